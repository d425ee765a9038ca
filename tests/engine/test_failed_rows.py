"""A row that no token can be chosen for: its sequence ends, the others and the books do not notice."""

from __future__ import annotations

import os
from collections import Counter

import msgspec
import pytest
from engine_double import PAGE, Engine, scripted_model, tiny_layouts
from lease_double import HELLO, SourceEnd

from sluice_engine.leader.handoff.ports import StreamEnd
from sluice_engine.leader.handoff.source import SourceHandoffs
from sluice_engine.leader.marks import LeaderMarks
from sluice_engine.leader.scheduling.sequence import EndCause, LeaseEnded, Mode, Phase
from sluice_engine.leader.step_loop import StepLoop
from sluice_engine.limits import Limits
from sluice_engine.rank.device import SynchronousModel
from sluice_engine.step import RowWork, SampledRow, StepResult
from sluice_protocol.generate import Refused
from sluice_protocol.sampling import Sampling
from sluice_protocol.source import LeaseAdmitted, Open, WantPrefill
from sluice_records import PoolPlan

SICK = 63


class SickModel(SynchronousModel):
    """The scripted model, but a sequence whose prompt has token SICK fails from its `after`-th token on."""

    def __init__(self, model, after):
        super().__init__()
        self.model, self.after, self.told = model, after, {}

    def free(self, row):
        self.told.pop(row, None)
        self.model.free(row)

    def append_pages(self, row, pages):
        self.model.append_pages(row, pages)

    def bind(self, binding):
        self.told.pop(binding.row, None)
        self.model.bind(binding)

    def run(self, work: tuple[RowWork, ...]):
        for each in work:
            if SICK in each.tokens:
                self.told[each.row] = 0
        return tuple(self._of(row) for row in self.model.run(work))

    def _of(self, sampled: SampledRow) -> SampledRow:
        if sampled.row not in self.told:
            return sampled
        self.told[sampled.row] += 1
        return SampledRow(sampled.row, (), failed="sick") if self.told[sampled.row] > self.after else sampled


def sick_engine(overlap: bool, after: int) -> Engine:
    return Engine(overlap=overlap, build_model=lambda pools, mirror: SickModel(scripted_model(pools, mirror), after))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("after", [0, 1, 5, 8])
def test_a_failed_row_ends_its_sequence_and_no_other(overlap, after):
    engine = sick_engine(overlap, after)
    fine = [engine.submit((1, 2, 3 + i), 12) for i in range(3)]
    sick = engine.submit((5, SICK, 7), 12)
    engine.run()
    assert engine.ended[sick] is EndCause.FAILED
    assert len(engine.outputs[sick]) == after
    assert [engine.ended[s] for s in fine] == [EndCause.FINISHED] * 3
    healthy = Engine(overlap=overlap)
    assert [engine.outputs[s] for s in fine] == [healthy.generate((1, 2, 3 + i), 12) for i in range(3)]
    assert engine.generate((1, 2, 3), 12) == engine.outputs[fine[0]]
    assert not engine.state.sequences


def test_a_failed_room_keeps_what_it_granted_until_its_lease_has_ended():
    engine = sick_engine(overlap=False, after=0)
    sequence = engine.submit((*range(20), SICK), 12, mode=Mode.SOURCE)
    for _ in range(6):
        engine.step()
    assert engine.state.sequences[sequence].phase is Phase.HELD
    assert engine.state.sequences[sequence].leased
    engine.tell(LeaseEnded(sequence))
    engine.run()
    assert sequence in engine.ended


def test_a_failed_first_token_ends_its_lease_by_name_and_grants_nothing_more():
    loop = StepLoop(Limits(PAGE, 16, 48, 8, 1024, 64), tiny_layouts(), b"salt" * 4, PoolPlan(64, 8, 8))
    sources = SourceHandoffs(loop, loop.admit, loop.tell, lambda: 0.0, Counter(), LeaderMarks(None))
    stream = SourceEnd()
    want = WantPrefill((1, 2, 3), (), Sampling(max_tokens=4), "r")
    sources.hear(stream, (Open("lease", HELLO.incarnation, HELLO.fingerprint, want, 0, 60_000),))
    planned = loop.plan([0], now=0.0).planned
    for number in (1, 2):
        sources.on_result(planned, StepResult(number, 0, (SampledRow(next(iter(planned.rows)), (), failed="sick"),)))
    assert stream.said == [LeaseAdmitted(os.getpid()), Refused("BadLogits", "sick")]
    assert (stream.ended, len(sources)) == (StreamEnd.OK, 0)


def test_a_failed_row_travels():
    told = StepResult(3, 0, (SampledRow(1, (), failed="sick"), SampledRow(2, (7,))))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=StepResult) == told
