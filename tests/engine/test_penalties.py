"""What a rank is told of a sequence's tokens where penalties need them."""

from __future__ import annotations

import pytest
from engine_double import Engine

from sluice_engine.leader.scheduling.sequence import Mode, SequenceSpec
from sluice_protocol.sampling import Sampling


@pytest.mark.parametrize("mode", [Mode.UNIFIED, Mode.SOURCE])
def test_a_retry_knows_prompt_from_output(mode: Mode) -> None:
    engine = Engine()
    spec = SequenceSpec(1, mode, (1, 2, 3), (4, 5), Sampling(max_tokens=8, frequency_penalty=0.5))
    assert engine.loop.admit(spec) is None
    (binding,) = engine.step().record.rows_bound
    assert (binding.history, binding.prompt_tokens) == ((1, 2, 3, 4, 5), 3)


def test_nothing_is_told_where_no_penalty_asks() -> None:
    engine = Engine()
    engine.submit((1, 2, 3))
    (binding,) = engine.step().record.rows_bound
    assert (binding.history, binding.prompt_tokens) == ((), 0)
