"""The control path, end to end: `sluice up --scripted` under streaming load. One token per running stream and step
through the real step loop, one SSE event per token, a NIXL handoff per request.

Usage: bench_control.py [--streams 1 16 64] [--tokens 300] [--runs 5] [--unified] [--page-tokens N]
       [--peer URL MODEL]

Prints per number of streams the median over the runs of chunks/s, first token and p99 gap, and CPU microseconds per
token and process; memory per process at the end. With --peer the same load goes to another server in between, run by
run, and the ratio is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

LOAD = Path(__file__).with_name("stream_load.py")


def load(url: str, model: str, streams: int, tokens: int) -> dict[str, Any]:
    """One run in a process of its own."""
    argv = [sys.executable, str(LOAD), url, model, str(streams), str(tokens), str(max(8, 4 * streams)), "--json"]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=300)
    told: dict[str, Any] = json.loads(done.stdout)
    if told["ok"] != told["requests"]:
        raise SystemExit(f"{told['requests'] - told['ok']} of {told['requests']} requests failed at {url}")
    return told


class Up:
    """`sluice up --scripted` as a child; `cpu` and `memory` by process name."""

    def __init__(self, *flags: str) -> None:
        self._runtime = tempfile.TemporaryDirectory(prefix="sluice-bench-")
        environment = os.environ | {"XDG_RUNTIME_DIR": self._runtime.name}
        argv = [sys.executable, "-m", "sluice_cli", "up", "--scripted", "--max-running", "128", *flags]
        self.process = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if "ready: http" in line:
                self.url = line.split("ready: ")[1].split()[0]
                return
        raise SystemExit("sluice up did not come up")

    def processes(self) -> dict[str, psutil.Process]:
        named = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            command = child.cmdline()
            module = command[command.index("-m") + 1] if "-m" in command else command[0]
            spec = next((part for part in command if part.endswith("spec.json") or part.endswith(".sock")), "")
            named[f"{Path(spec).parent.name or 'host'} {module.removeprefix('sluice_engine.')}"] = child
        return named

    def cpu(self) -> dict[str, float]:
        return {name: sum(process.cpu_times()[:2]) for name, process in self.processes().items()}

    def memory(self) -> dict[str, float]:
        """MiB resident; what is shared (torch, the zygote's) counts in each."""
        return {name: process.memory_info().rss / 2**20 for name, process in self.processes().items()}

    def stop(self) -> None:
        self.process.send_signal(2)
        self.process.wait(60)
        self._runtime.cleanup()


def page_tokens_flag(page_tokens: int) -> list[str]:
    """0: the scripted model's own."""
    return ["--page-tokens", str(page_tokens)] if page_tokens else []


def measure(up: Up, args: argparse.Namespace, streams: int) -> None:
    ours, peers, cpu = [], [], []
    for _ in range(args.runs):
        before = up.cpu()
        told = load(up.url, "scripted", streams, args.tokens)
        after = up.cpu()
        ours.append(told)
        cpu.append({name: (after[name] - before.get(name, 0.0)) / told["chunks"] * 1e6 for name in after})
        if args.peer:
            peers.append(load(args.peer[0], args.peer[1], streams, args.tokens))

    def median(runs: list[dict[str, Any]], key: str) -> float:
        return statistics.median(run[key] for run in runs)

    for name, runs in (("sluice", ours), ("peer", peers)):
        if runs:
            rates = [run["chunks_per_s"] for run in runs]
            print(
                f"{streams:3d} streams  {name:6s} {statistics.median(rates):8.0f} chunks/s"
                f" ({min(rates):.0f}-{max(rates):.0f})  first token {median(runs, 'first_token_ms'):7.1f} ms"
                f"  gap p99 {median(runs, 'gap_p99_ms'):6.2f} ms"
            )
    if peers:
        print(f"             ratio  {median(ours, 'chunks_per_s') / median(peers, 'chunks_per_s'):8.2f}")
    for name in sorted(cpu[0]):
        used = statistics.median(run.get(name, 0.0) for run in cpu)
        if used >= 0.5:
            print(f"             {used:6.1f} us/token  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--unified", action="store_true")
    parser.add_argument("--page-tokens", type=int, default=0)
    parser.add_argument("--peer", nargs=2, metavar=("URL", "MODEL"))
    args = parser.parse_args()
    print(
        f"machine: {platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    up = Up(*(["--unified"] if args.unified else []), *page_tokens_flag(args.page_tokens))
    try:
        load(up.url, "scripted", 4, 50)
        time.sleep(0.5)
        for streams in args.streams:
            measure(up, args, streams)
        for name, mib in sorted(up.memory().items()):
            print(f"             {mib:6.0f} MiB  {name}")
    finally:
        up.stop()


if __name__ == "__main__":
    main()
