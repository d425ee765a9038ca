"""Every hook point of the product is reached by some process in a real run: none of them is a name without a place."""

from __future__ import annotations

import pytest

from sluice_engine.points import ENGINE_POINTS
from sluice_faults import Action, Order, place, reached
from sluice_gateway.points import GATEWAY_POINTS
from sluice_harness.profiles import PROFILES
from sluice_harness.runner import Scale
from sluice_harness.stack import Stack
from sluice_runtime.fault_points import SUPERVISOR_POINTS

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]
POINTS = (*ENGINE_POINTS, *GATEWAY_POINTS, *SUPERVISOR_POINTS)
# In the gateway's thread pool only; the answer may well be that it is too long.
HUGE = "tokenise me " * 4000


def test_every_point_is_reached():
    with Stack(PROFILES["model"], Scale.unscaled().health, Scale.unscaled().probing) as stack:
        for point in POINTS:
            for service in stack.services.values():
                place(service.faults, point, Order(Action.PASS))
        stack.restart("decode-0")
        for prompt in ("hello", HUGE):
            stack.chat(prompt, 20).wait(60.0)
        victim = stack.engines["prefill-0"]
        place(victim.faults, "leader.plan", Order(Action.RAISE))
        stack.chat("the last one", 5)
        victim.process.wait(60.0)
        missing = set(POINTS) - {
            point
            for point in POINTS
            for service in stack.services.values()
            if reached(service.faults, point) is not None
        }
        assert missing == set()
        for service in stack.services.values():
            for path in service.faults.glob("*.json"):
                path.unlink()
