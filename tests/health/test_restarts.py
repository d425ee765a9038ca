"""How often a child may die, and whom its supervisor hears last."""

from __future__ import annotations

import pytest

from sluice_protocol.service_spec import LogFormat
from sluice_runtime.health.reading import Exit
from sluice_runtime.process.children import ChildDied, Children, StderrTerms
from sluice_runtime.process.restarts import DeathWindow, RestartPolicy
from sluice_runtime.process.supervisor import Refused, errors_of, exits_of, has_followed

POLICY = RestartPolicy(most=3, window_s=10.0, reason="TooOften", final=frozenset((7,)))


def test_deaths_within_the_window_are_counted_and_older_ones_are_not() -> None:
    deaths = DeathWindow(POLICY)
    assert [deaths.died(at) for at in (0.0, 5.0, 10.0, 14.0)] == [1, 2, 2, 3]
    assert deaths.is_full
    assert deaths.died(30.0) == 1
    assert not deaths.is_full


def test_what_is_no_death_is_raised() -> None:
    followed, first = ChildDied("a", 0), ChildDied("b", -9, "Killed")
    assert [has_followed(error) for error in (followed, first, Refused())] == [True, False, False]
    assert exits_of([followed, first]) == [Exit("a", 0), Exit("b", -9, "Killed")]
    with pytest.raises(Refused):
        exits_of([first, Refused()])
    assert errors_of([]) == []


@pytest.mark.parametrize(
    ("gone", "detail"),
    [
        (Exit("plain", 1), "ValueError: no such secr*t"),
        (Exit("plain", 1, "Reason", "told"), "told"),
        (Exit("native", 1, "Reason", "told"), "told; its stderr: ValueError: no such secr*t"),
        (Exit("forked", 1), "ValueError: no such secr*t"),
    ],
)
async def test_last_words_are_added_where_they_say_more(gone: Exit, detail: str) -> None:
    terms = StderrTerms(inherited="plain", has_reason=frozenset(("native",)))
    children = Children("s", LogFormat.HUMAN, terms)
    try:
        for name in ("plain", "native"):
            process = await children.start(name, "-c", "raise ValueError('no such secr*t')")
            await children.hear(name)
            assert await process.wait() == 1
        assert children.with_last_words(gone).detail == detail
    finally:
        await children.kill_all()
