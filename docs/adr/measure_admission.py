"""What requests cost the scheduler of a pool full of cached pages: its admission, and the plan that makes room for it.

Usage: measure_admission.py [TREE]   (an older checkout of this repository; default: this one)
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

TREE = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2]
sys.path[:0] = [str(TREE / root) for root in ("tests/support", "engine", "records", "protocol", "kernels")]

from engine_double import tiny_layouts  # noqa: E402

from sluice_engine.leader.scheduling.admission import admit  # noqa: E402
from sluice_engine.leader.scheduling.ledger import CACHE, Ledger  # noqa: E402
from sluice_engine.leader.scheduling.schedule import plan  # noqa: E402
from sluice_engine.leader.scheduling.sequence import Mode, SequenceSpec  # noqa: E402
from sluice_engine.leader.scheduling.state import SchedulerState  # noqa: E402
from sluice_engine.limits import Limits  # noqa: E402
from sluice_protocol.sampling import Sampling  # noqa: E402
from sluice_records import PoolPlan, RecordKind  # noqa: E402

PAGE, ROUNDS = 16, 5


def full(pages: int, chain: int) -> SchedulerState:
    """`pages` cached pages in chains of `chain`, none free, nobody running."""
    limits = Limits(PAGE, 1 << 17, 1 << 17, 128, 1 << 20, 256)
    state = SchedulerState(limits, tiny_layouts(), b"salt" * 4, Ledger(PoolPlan(pages, 140, 140)))
    for number in range(pages):
        parent = (number - 1).to_bytes(16, "big") if number % chain else None
        ref = state.ledger.reserve(RecordKind.PAGE, CACHE)
        assert state.cache.insert_page(number.to_bytes(16, "big"), parent, ref)
    return state


def measure(pages: int, chain: int, prompt: int) -> None:
    state, admissions, plans = full(pages, chain), [], []
    for number in range(1, ROUNDS + 1):
        tokens = tuple((number * 7 + i) % 250 for i in range(prompt))
        started = time.process_time()
        assert admit(state, SequenceSpec(number, Mode.SOURCE, tokens, (), Sampling(max_tokens=2))) is None
        admitted = time.process_time()
        state, _ = plan(state, [])
        admissions.append(admitted - started)
        plans.append(time.process_time() - admitted)
    told = [f"{statistics.median(times) * 1e3:9.3f} ms" for times in (admissions, plans)]
    print(f"{pages:6d} pages in chains of {chain:5d}, prompt of {prompt:6d}: admission {told[0]}, plan {told[1]}")


for case in ((4096, 16, 270), (65536, 16, 270), (65536, 4096, 270), (65536, 4096, 65_000)):
    measure(*case)
