"""61 MiB of page records over NIXL on CPU, against one contiguous READ of the same bytes in the same run.

    .venv/bin/python tools/bench/bench_handoff.py [--rounds 9] [--lanes tcp,cma,self]

Two processes, as in production: a source sidecar, and a reader that is the puller over the NIXL transport with the
sidecar's own parts (this process is started by exec and owns the reader's agent). Arms are interleaved, medians told.

    contiguous   one descriptor of the same size, one READ, polled without a pause: the mark
    adjacent     64 records in a row on both sides, through plan, pieces and puller, nothing verified but trailers
    scattered    64 records in random order, likewise
    + digests    the same with every digest checked, pipelined behind the pieces
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sluice_engine.pool import Pools, create_memory, map_pools
from sluice_engine.step import PullItem
from sluice_engine.transfer.contract import DONE, PENDING
from sluice_engine.transfer.lanes import choose_lanes, count_nvidia_gpus
from sluice_engine.transfer.messages import FrameReader, PullFailed, RecordsDone, SidecarHello, decode_report
from sluice_engine.transfer.nixl import NixlSettings, NixlTransfer, load_nixl
from sluice_engine.transfer.plan import Piece, Run
from sluice_engine.transfer.puller import Puller
from sluice_engine.transfer.spec import MemorySpec, SidecarRole, SidecarSpec, write_spec
from sluice_engine.transfer.verify import ThreadVerifier, VerifyLevel, VerifyPolicy
from sluice_protocol.fingerprint import Fingerprint
from sluice_protocol.source import SourceHello
from sluice_records import (
    CacheGeometry,
    CachePrecision,
    LayerKind,
    Layouts,
    PoolPlan,
    RecordKind,
    Trailer,
    build_layouts,
)

RECORDS = 64
# Twice as many on each side, so that scattered records have somewhere to be.
PLAN = PoolPlan(2 * RECORDS, 1, 1)
KEY = os.urandom(32)
IDENTITY = b"bench".ljust(16, b".")


def flash_like() -> Layouts:
    """Pages of 0.95 MiB: bf16 KV and index keys of Flash's head sizes, 256 tokens, 12 CSA layers and 1 HCA layer."""
    layers = (LayerKind.CSA,) * 12 + (LayerKind.HCA,) * 2
    geometry = CacheGeometry(layers, 512, 64, 128, 128, 4, 128)
    return build_layouts(geometry, CachePrecision.parse("bf16"), 256)


class Source:
    """A sidecar of its own, over memory that this process fills."""

    def __init__(self, layouts: Layouts, lanes: str, folder: Path) -> None:
        self.fd = create_memory(layouts, PLAN, "bench-source")
        self.pools = map_pools(self.fd, layouts, PLAN)
        fill(self.pools)
        spec = write_spec(SidecarSpec(MemorySpec.of(layouts, PLAN), "source.1", KEY, SidecarRole.SOURCE, one_host=True))
        path = folder / "source.sock"
        told = ["--spec-fd", str(spec), "--memory-fd", str(self.fd), "--socket", str(path), "--lanes", lanes]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sluice_engine.transfer.sidecar", *told],
            pass_fds=(spec, self.fd),
            stdout=subprocess.DEVNULL,
        )
        self.hello = self._hello(path)

    def _hello(self, path: Path) -> SourceHello:
        frames, bodies = FrameReader(), list[bytes]()
        while not path.exists():
            time.sleep(0.01)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            while not bodies:
                bodies = frames.feed(connection.recv(1 << 16))
        told = decode_report(bodies[0])
        assert isinstance(told, SidecarHello)
        print(f"lane {told.lane.lane}, self-test {told.lane.bytes_per_second / 1e9:.2f} GB/s {told.lane.warning}")
        return told.source_hello(Fingerprint(()))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def fill(pools: Pools) -> None:
    pool = pools[RecordKind.PAGE]
    noise = random.Random(1).randbytes(pool.layout.record_bytes)
    for record in range(pool.num_records):
        pool.record(record)[:] = memoryview(noise).cast("B")
        pool.record(record)[:8] = record
        digest = pool.digest(record, IDENTITY)
        pool.write_trailer(record, Trailer(pool.layout.format_id, IDENTITY, 1, 256, digest))


def items_of(source: Pools, pairs: Sequence[tuple[int, int]]) -> list[PullItem]:
    pool = source[RecordKind.PAGE]
    digests = {s: pool.trailer(s).digest for s, _ in pairs}
    return [PullItem(RecordKind.PAGE, s, 1, d, IDENTITY, digests[s], 256) for s, d in pairs]


class Reader:
    def __init__(self, layouts: Layouts, lanes: str, source: Source) -> None:
        self.fd = create_memory(layouts, PLAN, "bench-reader")
        self.pools = map_pools(self.fd, layouts, PLAN)
        self.transfer = NixlTransfer(
            load_nixl(NixlSettings(lanes, one_host=True)), f"bench-{os.getpid()}", KEY, self.pools, None
        )
        self.source = source
        policies = {"trailers": VerifyPolicy(VerifyLevel.SAMPLE, every=1 << 30), "digests": VerifyPolicy()}
        self.pullers = {
            name: Puller(self.transfer, self.pools, ThreadVerifier(self.pools, policy))
            for name, policy in policies.items()
        }
        for puller in self.pullers.values():
            puller.attach(source.hello)
        self.serial = 0

    def contiguous(self, nbytes: int) -> float:
        piece = Piece("c", self.source.hello.incarnation, (Run(RecordKind.PAGE, 0, 0, nbytes),), (), ())
        start = time.perf_counter()
        handle = self.transfer.post(piece)
        while (outcome := self.transfer.poll(handle)) is PENDING:
            pass
        took = time.perf_counter() - start
        assert outcome is DONE, outcome
        self.transfer.release(handle)
        return took

    def pull(self, which: str, items: list[PullItem]) -> float:
        """From the command to `RecordsDone`, as the poller's thread runs it."""
        puller, self.serial = self.pullers[which], self.serial + 1
        lease_id, done = f"l{self.serial}", False
        start = time.perf_counter()
        puller.add(lease_id, self.source.hello.incarnation, items, time.monotonic())
        while not done:
            for event in puller.tick(time.monotonic(), helping=True):
                assert not isinstance(event, PullFailed), event
                done = isinstance(event, RecordsDone)
            if not done and (idle := puller.idle_for(time.monotonic())) and not puller.help_verify():
                time.sleep(min(idle, 100e-6))
        took = time.perf_counter() - start
        puller.forget(lease_id, time.monotonic())
        return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--lanes", default=choose_lanes(count_nvidia_gpus()))
    args = parser.parse_args()
    layouts = flash_like()
    nbytes = RECORDS * layouts.page.record_bytes
    print(f"machine: {machine()}")
    print(f"{RECORDS} records of {layouts.page.record_bytes / 2**20:.3f} MiB, {nbytes / 2**20:.1f} MiB, {args.lanes}")
    with tempfile.TemporaryDirectory() as folder:
        source = Source(layouts, args.lanes, Path(folder))
        try:
            show(nbytes, measure(Reader(layouts, args.lanes, source), nbytes, args.rounds))
        finally:
            source.end()
    sys.stdout.flush()
    # Agents are not destroyed.
    os._exit(0)


def measure(reader: Reader, nbytes: int, rounds: int) -> dict[str, list[float]]:
    order = random.Random(7)
    adjacent = items_of(reader.source.pools, [(n, n) for n in range(RECORDS)])
    froms, tos = order.sample(range(2 * RECORDS), RECORDS), order.sample(range(2 * RECORDS), RECORDS)
    scattered = items_of(reader.source.pools, list(zip(froms, tos, strict=True)))
    arms: dict[str, Callable[[], float]] = {
        "contiguous": lambda: reader.contiguous(nbytes),
        "adjacent": lambda: reader.pull("trailers", adjacent),
        "scattered": lambda: reader.pull("trailers", scattered),
        "adjacent + digests": lambda: reader.pull("digests", adjacent),
        "scattered + digests": lambda: reader.pull("digests", scattered),
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds + 2):
        names = list(arms)
        order.shuffle(names)
        for name in names:
            took = arms[name]()
            # The first two turns fault pages in and connect.
            if turn >= 2:
                times[name].append(took)
    return times


def show(nbytes: int, times: dict[str, list[float]]) -> None:
    mark, best = statistics.median(times["contiguous"]), min(times["contiguous"])
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(
            f"{name:20} {median * 1e3:7.2f} ms  {nbytes / median / 1e9:6.2f} GB/s  ratio {mark / median:5.2f}"
            f"   (min {min(seconds) * 1e3:.2f}, max {max(seconds) * 1e3:.2f}, of minima {best / min(seconds):.2f})"
        )


def machine() -> str:
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return f"{model}, {os.cpu_count()} cores, Linux {platform.release()}, load {os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
    main()
