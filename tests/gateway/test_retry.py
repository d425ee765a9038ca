"""What follows the end of a try, as a table."""

from __future__ import annotations

import pytest

from sluice_gateway.routing.reasons import POLICIES, TOKENS_SUSPECT, client_error, policy_of
from sluice_gateway.routing.retry import Again, Done, GiveUp, TryResult, judge
from sluice_gateway.routing.session import Lost
from sluice_protocol.generate import Ended, EndReason, Refused

LOST = Lost("EngineLost", "gone")
TABLE: list[tuple[TryResult, str | None, int, Done | Again | int]] = [
    (Ended(EndReason.STOP, 3), None, 0, Done("stop")),
    (Ended(EndReason.LENGTH, 3), None, 0, Done("length")),
    (LOST, "stop", 0, Done("stop")),
    (Ended(EndReason.FAILED, 1, error="PullFailed"), "length", 9, Done("length")),
    (LOST, None, 0, Again(0.0, True, 1)),
    (LOST, None, 1, Again(0.0, True, 2)),
    (LOST, None, 2, 503),
    (Ended(EndReason.PREEMPTED, 3), None, 2, Again(0.02, True, 2)),
    (Ended(EndReason.FAILED, 1, error="Draining"), None, 2, Again(0.02, True, 2, drains=True)),
    (Ended(EndReason.FAILED, 1, error="NeverHeardOf"), None, 0, Again(0.0, True, 1)),
    (Ended(EndReason.FAILED, 1, error="NeverHeardOf"), None, 2, 503),
    (Ended(EndReason.FAILED, 1, error="ContextTooLong"), None, 0, 400),
    (Refused("ResourceExhausted", "full", 500), None, 2, Again(0.5, False, 2)),
    (Refused("AnythingAtAll", "later", 1), None, 2, Again(0.02, False, 2)),
    (Refused("NotAttached", "who?", 0), None, 2, Again(0.02, False, 2)),
    (Refused("FingerprintMismatch", "rope", 0), None, 1, Again(0.02, True, 2)),
    (Refused("FingerprintMismatch", "rope", 0), None, 2, 503),
    (Refused("InvalidArgument", "vocab", 0), None, 0, 400),
    (Refused("BadSampling", "repetition_penalty is 0", 0), None, 0, 400),
    (Ended(EndReason.FAILED, 1, error="BadSampling"), None, 0, 400),
    (Ended(EndReason.FAILED, 0, error="RecordCorrupt"), None, 0, Again(0.0, True, 1)),
    (Ended(EndReason.FAILED, 3, error="TokensSuspect"), None, 0, 503),
    (Ended(EndReason.FAILED, 1, error="BadLogits", detail="logits at position 3 are not finite"), None, 0, 500),
]


@pytest.mark.parametrize(("result", "finished", "spent", "expected"), TABLE)
def test_the_end_of_a_try_decides_what_comes_next(
    result: TryResult, finished: str | None, spent: int, expected: Done | Again | int
) -> None:
    step = judge(result, finished, tries=1, spent=spent, budget=2)
    if isinstance(expected, int):
        assert isinstance(step, GiveUp)
        assert step.error.status == expected
    else:
        assert step == expected


@pytest.mark.parametrize(("victims", "code"), [(0, "EngineLost"), (1, "EngineLost"), (2, "PoisonSuspected")])
def test_a_request_under_which_several_engines_failed_is_suspect_once_its_budget_is_spent(victims, code) -> None:
    assert judge(LOST, None, 2, 1, 2, victims=victims) == Again(0.0, True, 2)
    step = judge(LOST, None, 3, 2, 2, victims=victims)
    assert isinstance(step, GiveUp)
    assert (step.error.status, step.error.code) == (503, code)
    assert step.error.again == (code == "EngineLost")


def test_what_every_engine_would_say_again_is_never_retried_and_everything_else_is() -> None:
    for reason, policy in POLICIES.items():
        assert policy.retry == (policy.status == 503 and reason != TOKENS_SUSPECT), reason
        assert client_error(reason, "", 1).again == (policy.status != 500), reason
    assert policy_of("NeverHeardOf").spends
