"""A small mass abort: sessions in every phase go away at once, and who asks next is answered soon."""

from __future__ import annotations

import pytest

from sluice_harness.runner import Scale
from sluice_harness.storm import run_storm

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]


def test_after_a_mass_abort_the_next_one_is_answered_and_everything_went_back():
    storm = run_storm(16, 2, Scale.unscaled().health)
    for told in storm.rounds:
        assert all(told.phases[phase] > 0 for phase in ("queued", "prefilling", "pulling", "decoding")), told.phases
    assert storm.worst_s < storm.unloaded_s + 10.0  # generous: the goal is a figure, not an assertion here
    assert storm.grown == {}
