"""When an output is over: the same answer for the scheduler, the stream, the source of a handoff and the gateway."""

from __future__ import annotations

import pytest

from sluice_protocol.generate import EndReason
from sluice_protocol.outputs import OutputLimit
from sluice_protocol.sampling import Sampling


@pytest.mark.parametrize(
    ("token", "count", "reason"),
    [
        (7, 1, EndReason.STOP),
        (7, 3, EndReason.STOP),  # the last one that may come, and it ends the output by itself
        (8, 1, None),
        (8, 2, None),
        (8, 3, EndReason.LENGTH),
    ],
)
def test_a_token_ends_the_output_by_itself_or_by_its_number(token: int, count: int, reason: EndReason | None) -> None:
    limit = OutputLimit.of(Sampling(max_tokens=5, stop_token_ids=(7,)), num_outputs=2)
    assert limit.end_after(token, count) is reason
