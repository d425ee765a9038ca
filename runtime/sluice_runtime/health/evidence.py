"""The evidence bundle: everything that can still be seen of a wedged or dead service, in one folder.

Written by the supervisor from the recorder, from stacks that processes write themselves, and from /proc: nothing in it
needs the help of a process that is stuck. It may hold prompts (step records carry tokens, stacks may carry text).
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sluice_runtime.health.machine import describe_machine
from sluice_runtime.health.proc import describe_process, process_state
from sluice_runtime.health.recorder import Recorder
from sluice_runtime.health.secrets import values_without_secrets
from sluice_runtime.health.stacks import collect_stacks
from sluice_runtime.health.verdict import Verdict

STACKS_S = 3.0
PREFIX = "incident-"
UNFINISHED = ".writing-"
PARTIAL = "PARTIAL"
RECORDER_FILE, VERDICT_FILE, ABOUT_FILE, MACHINE_FILE = "recorder.bin", "verdict.json", "about.json", "machine.txt"
NOTICE = "This bundle may contain prompts and answers: treat it as you treat your users' data.\n"


@dataclass(frozen=True, slots=True)
class EvidenceLimits:
    """Of one service's folder: the oldest bundles go first, and the newest stays whatever it weighs."""

    bundles: int = 5
    nbytes: int = 64 * 1024 * 1024


def write_bundle(
    folder: Path,
    run_dir: Path,
    recorder: Recorder,
    verdict: Verdict,
    pids: Mapping[str, int],
    about: Mapping[str, object],
    limits: EvidenceLimits = EvidenceLimits(),
    reach: Callable[[], None] = lambda: None,
    published: Callable[[Path], None] = lambda bundle: None,
) -> Path:
    """The bundle's path. Raises OSError (disk full) while there is none; what was written of it is removed. Blocks for
    up to STACKS_S, or for as long as something in /proc does: what is known without it is `published` before, and a
    bundle whose rest does not come has PARTIAL in it. `about`: config, fingerprint, versions; secrets in its URLs are
    taken out here, keys by the caller."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it may hold prompts
    for path in folder.glob(f"{UNFINISHED}*"):  # of a supervisor that was killed while it wrote
        shutil.rmtree(path, ignore_errors=True)
    number = 1 + max((_number(path) for path in folder.glob(f"{PREFIX}*")), default=0)
    name = f"{PREFIX}{number:04d}-{verdict.reason or verdict.kind.value}"
    fresh, bundle = folder / f"{UNFINISHED}{name}", folder / name
    try:
        fresh.mkdir(mode=0o700)
        reach()
        (fresh / RECORDER_FILE).write_bytes(recorder.copied())
        judged = verdict.as_dict() | {"message": str(verdict)}
        (fresh / VERDICT_FILE).write_text(json.dumps(values_without_secrets(judged), indent=1) + "\n")
        (fresh / ABOUT_FILE).write_text(json.dumps(values_without_secrets(about), indent=1, default=str) + "\n")
        (fresh / "READ-ME-FIRST").write_text(NOTICE)
        (fresh / PARTIAL).write_text(
            "Stacks, /proc or the machine are missing: writing them has not come to its end.\n"
        )
        fresh.replace(bundle)
    except OSError:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    published(bundle)
    prune(folder, limits)
    try:
        (bundle / MACHINE_FILE).write_text(describe_machine((folder, run_dir)))
        with (bundle / "supervisor.stacks").open("wb") as file:
            faulthandler.dump_traceback(file)
        _write_processes(bundle, run_dir, pids)
        (bundle / PARTIAL).unlink()
    except OSError as error:
        with contextlib.suppress(OSError):  # a disk without room for it
            (bundle / PARTIAL).write_text(f"Stacks, /proc or the machine are missing: {error}\n")
    prune(folder, limits)
    return bundle


def _write_processes(fresh: Path, run_dir: Path, pids: Mapping[str, int]) -> None:
    """/proc first: a process may be gone by the time its stacks have come."""
    for name, pid in pids.items():
        (fresh / f"{name}.proc").write_text(describe_process(pid))
    for name, stacks in collect_stacks(run_dir, pids, STACKS_S).items():
        (fresh / f"{name}.stacks").write_text(stacks or f"no stacks: {process_state(pids[name])}; see its .proc file\n")


def prune(folder: Path, limits: EvidenceLimits) -> None:
    """Oldest first, by number. What is no bundle is not ours, and stays."""
    bundles = sorted((path for path in folder.glob(f"{PREFIX}*") if path.is_dir()), key=_number)
    sizes = [sum(_bytes_of(file) for file in bundle.iterdir()) for bundle in bundles]
    while len(bundles) > 1 and (len(bundles) > limits.bundles or sum(sizes) > limits.nbytes):
        shutil.rmtree(bundles.pop(0), ignore_errors=True)
        sizes.pop(0)


def _bytes_of(file: Path) -> int:
    """0 for what cannot be looked at, such as a link that leads nowhere: it keeps no other bundle from going."""
    try:
        return file.lstat().st_size
    except OSError:
        return 0


def _number(bundle: Path) -> int:
    found = re.match(rf"{PREFIX}(\d+)", bundle.name)
    return int(found[1]) if found else 0
