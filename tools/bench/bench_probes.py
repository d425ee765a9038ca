"""How fast a supervisor answers its probes while everything it watches is stuck and every core is busy.

    .venv/bin/python tools/bench/bench_probes.py [--probes 1000]

One engine whose leader and rank are stopped by a signal (with a budget so long that no verdict comes), and one process
per core that does nothing but count. p50, p99 and the worst of sequential GETs of /livez, beside the same at rest.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from http.client import HTTPConnection
from pathlib import Path

from sluice_launch.commands import engine_command
from sluice_launch.process import Event, Process


def start_engine(folder: Path) -> tuple[Process, Event]:
    """And what it said when it was ready."""
    spec = {"role": "unified", "name": "probed", "run_dir": str(folder), "key": "k", "scripted": {}}
    process = Process(engine_command({**spec, "health": {"floor_s": 3600.0}}))
    return process, process.wait_ready()


def measure(port: int, count: int) -> list[float]:
    """Milliseconds, sorted; each probe a connection of its own, as the kubelet's are."""
    times = []
    for _ in range(count):
        started = time.perf_counter()
        connection = HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/livez")
        status = connection.getresponse().status
        connection.close()
        assert status == 200, status
        times.append((time.perf_counter() - started) * 1e3)
    return sorted(times)


def tell(what: str, times: list[float]) -> None:
    p99 = times[int(len(times) * 0.99)]
    print(f"{what:28} p50 {statistics.median(times):7.2f} ms   p99 {p99:7.2f} ms   worst {times[-1]:7.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--probes", type=int, default=1000)
    args = parser.parse_args()
    burners: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        engine, ready = start_engine(Path(folder))
        stuck = [int(ready["pid"]), *(int(pid) for pid in ready["ranks"].values())]
        try:
            tell("at rest", measure(ready["probes"], args.probes))
            for pid in stuck:
                os.kill(pid, signal.SIGSTOP)
            tell("leader and rank stuck", measure(ready["probes"], args.probes))
            cores = os.cpu_count() or 1
            own_end = f"from sluice_runtime.process.processes import die_with_parent; die_with_parent({os.getpid()})"
            burn = f"{own_end}\nwhile True: pass"
            burners = [subprocess.Popen([sys.executable, "-c", burn]) for _ in range(cores)]
            tell(f"stuck, {cores} cores busy", measure(ready["probes"], args.probes))
        finally:
            for burner in burners:
                burner.kill()
                burner.wait()
            for pid in stuck:
                os.kill(pid, signal.SIGCONT)
            engine.end(60)


if __name__ == "__main__":
    main()
