"""What a process can see of the machine it runs on: for a bundle, since many a wedge is not the program's own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

_FILES = ("/proc/loadavg", "/proc/pressure/cpu", "/proc/pressure/memory", "/proc/pressure/io", "/proc/sys/fs/file-nr")
_MEMORY = ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree", "Dirty", "Shmem", "HugePages_Free")
_CGROUP = ("memory.current", "memory.max", "memory.events", "cpu.max", "cpu.stat", "pids.current", "pids.max")
# The same of the older hierarchy, by controller.
_CGROUP_V1 = (
    "memory/memory.usage_in_bytes",
    "memory/memory.limit_in_bytes",
    "memory/memory.failcnt",
    "cpu/cpu.cfs_quota_us",
    "cpu/cpu.stat",
)
_ROOT = Path("/sys/fs/cgroup")


def describe_machine(folders: Iterable[Path]) -> str:
    """Text: load, pressure, memory, limits of the container, and the space in `folders`. Never raises OSError."""
    lines = [f"--- cpus: {os.cpu_count()} in the machine, {len(os.sched_getaffinity(0))} for us"]
    lines += [f"--- {name}\n{text}" for name in _FILES if (text := _read(Path(name)))]
    memory = [line for line in _read(Path("/proc/meminfo")).splitlines() if line.partition(":")[0] in _MEMORY]
    lines.append("--- /proc/meminfo\n" + "\n".join(memory))
    lines += [f"--- {path}\n{text}" for path in _cgroup_files() if (text := _read(path))]
    lines += [f"--- space in {folder}: {_space(folder)}" for folder in folders]
    return "\n".join(lines) + "\n"


def _cgroup_files() -> list[Path]:
    """Of a container its own group is mounted at the root; elsewhere the kernel says where ours is."""
    own = _read(Path("/proc/self/cgroup")).rpartition("::")[2].strip().lstrip("/")
    bases = [base for base in (_ROOT / own, _ROOT) if (base / "memory.current").exists()]
    return [bases[0] / name for name in _CGROUP] if bases else [_ROOT / name for name in _CGROUP_V1]


def _space(folder: Path) -> str:
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return f"({error.strerror})"
    return f"{usage.free >> 20} MiB free of {usage.total >> 20}"


def _read(path: Path) -> str:
    try:
        return path.read_text()[:16384].strip()
    except OSError:
        return ""
