"""What it costs to verify a cached prefix before it is read again: first token with and without, in one run.

    .venv/bin/python tools/bench/bench_reuse.py models/NAME [--tokens 65536] [--runs 7]

One engine's plan and rank in one process. The prefix is a chain of closed, cached pages and a snapshot; the request has
64 tokens more. Prints both medians, their ratio (the bar is 1.10), and the rate at which records are verified.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from sluice_engine.leader.scheduling.admission import admit
from sluice_engine.leader.scheduling.ledger import CACHE, Ledger, Seal
from sluice_engine.leader.scheduling.schedule import plan
from sluice_engine.leader.scheduling.sequence import Aborted, Fact, Mode, SequenceSpec, StepDone
from sluice_engine.leader.scheduling.state import Plan, SchedulerState
from sluice_engine.model.config import load_model_config
from sluice_engine.pool import create_memory, map_pools
from sluice_engine.rank.executor import Executor
from sluice_engine.rank.host_store import HostStore
from sluice_engine.rank.mirror import RecordMirror
from sluice_engine.rank.runner import build_runner
from sluice_engine.spec import default_page_tokens, resolve
from sluice_engine.step import Close, StepRecord, StepResult
from sluice_protocol.engine_spec import EngineSpec
from sluice_protocol.generate import Role
from sluice_protocol.sampling import Sampling
from sluice_records import PoolPlan, RecordKind, block_keys, record_identity
from sluice_runtime.process.processes import settle_heap

SUFFIX = 64


class Engine:
    def __init__(self, directory: Path, tokens: int) -> None:
        page_tokens = default_page_tokens(load_model_config(directory).geometry())
        pages = tokens // page_tokens
        spec = EngineSpec(role=Role.UNIFIED, name="bench", run_dir="/nowhere", model=str(directory), max_running=2)
        resolved = resolve(spec)
        self.layouts, sizes = resolved.layouts, PoolPlan(pages + 16, 2, 2)
        limits = replace(resolved.limits, max_context_tokens=tokens + 2 * SUFFIX)
        self.state = SchedulerState(limits, self.layouts, bytes(16), Ledger(sizes))
        self.pools = map_pools(create_memory(self.layouts, sizes, "bench"), self.layouts, sizes)
        mirror = RecordMirror(sizes)
        self.executor = Executor(
            0, HostStore(0, self.pools), mirror, build_runner(directory, self.layouts, self.pools, mirror)
        )
        self.prompt = tuple(n % 200 + 5 for n in range(tokens))
        self._next = 0
        self._facts: list[Fact] = []
        self._results: deque[StepResult] = deque()
        self._cache(list(block_keys(self.state.salt, self.prompt, page_tokens)), page_tokens)

    def _cache(self, keys: list[bytes], page_tokens: int) -> None:
        """The prefix as if it had been computed and closed: what is in the records does not matter to their cost."""
        ledger, cache = self.state.ledger, self.state.cache
        pages = ledger.reserve_all(RecordKind.PAGE, CACHE, len(keys), announce=True)
        snapshots = ledger.reserve_all(RecordKind.SNAPSHOT, CACHE, 1, announce=True)
        seals = [Seal(record_identity(self.layouts[RecordKind.PAGE], key), page_tokens) for key in keys]
        seals.append(Seal(record_identity(self.layouts[RecordKind.SNAPSHOT], keys[-1]), len(keys) * page_tokens))
        refs = [*pages, *snapshots]
        ledger.close_all(refs, seals)
        closes = [Close(ref, *seal) for ref, seal in zip(refs, seals, strict=True)]
        self.executor.execute(StepRecord(0, reserved=tuple(refs), closed=tuple(closes)))
        cache.insert_chain(keys, None, pages)
        cache.insert_snapshot(keys[-1], snapshots[0])

    def first_token(self) -> tuple[float, int, int]:
        """(seconds from admission to the first token, records verified, nanoseconds of it) of one request."""
        self._next += 1
        prompt = (*self.prompt, *range(self._next, self._next + SUFFIX))
        spec = SequenceSpec(self._next, Mode.UNIFIED, prompt, (), Sampling(max_tokens=2))
        start = time.perf_counter()
        assert admit(self.state, spec) is None
        checks = check_ns = 0
        while True:
            planned, result = self._turn()
            checks, check_ns = checks + len(planned.record.checks), check_ns + result.check_ns
            if result.sampled:
                break
        took = time.perf_counter() - start
        self._facts.append(Aborted(spec.id))
        while self.state.sequences:
            self._turn()
        return took, checks, check_ns

    def _turn(self) -> tuple[Plan, StepResult]:
        """One step, in lockstep; an empty one is not sent."""
        while self._results and self.state.sees(self._results[0].number):
            self._facts.append(StepDone(self._results.popleft()))
        facts, self._facts = self._facts, []
        self.state, planned = plan(self.state, facts)
        if planned.record.is_empty:
            return planned, StepResult(planned.record.number, 0, ())
        result = self.executor.execute(planned.record)
        assert not result.bad
        self._results.append(result)
        return planned, result


def measure(engine: Engine, runs: int) -> list[tuple[str, list[tuple[float, int, int]]]]:
    """Alternating: with checks, without."""
    arms: list[tuple[str, Callable[[], int]]] = [("verified", lambda: 1), ("unchecked", lambda: 1 << 62)]
    told: list[tuple[str, list[tuple[float, int, int]]]] = [(name, []) for name, _ in arms]
    for _ in range(runs):
        for (_, every), (_, times) in zip(arms, told, strict=True):
            engine.state.limits = replace(engine.state.limits, check_every=every())
            engine.state.reused_pages = 1  # of "every n-th", the first is not due
            times.append(engine.first_token())
    return told


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--runs", type=int, default=7)
    args = parser.parse_args()
    engine = Engine(args.model, args.tokens)
    engine.first_token()
    settle_heap()  # as a rank and a leader do: no collection goes through what is there for good
    medians = {}
    for name, times in measure(engine, args.runs):
        medians[name] = statistics.median(took for took, _, _ in times)
        print(f"{name:10s} first token {medians[name] * 1e3:8.1f} ms, {times[0][1]} records verified")
        if times[0][1] > 1:
            check_s = statistics.median(check_ns for _, _, check_ns in times) / 1e9
            nbytes = (times[0][1] - 1) * engine.layouts[RecordKind.PAGE].record_bytes
            rate = f"{nbytes / 2**20:.1f} MiB, {nbytes / check_s / 1e9:.2f} GB/s"
            print(f"           of it verifying {check_s * 1e3:8.1f} ms: {rate}")
    print(f"ratio      {medians['verified'] / medians['unchecked']:.3f}  (bar 1.10)")


if __name__ == "__main__":
    main()
