"""The Lease over an API server in memory: what a renewal that is cut off leaves behind."""

from __future__ import annotations

import asyncio

from sluice_operator.decide.lease import Timing
from sluice_operator.live.cluster import Conflict, Unreachable
from sluice_operator.live.election import Election, Leadership

TIMING = Timing(duration=20, deadline=10, period=2, call=8)


class OneLease:
    """The API server, as far as one Lease goes: versions are checked. `stuck`: it obeys, and does not answer."""

    def __init__(self):
        self.there, self.version = None, 0
        self.stuck = False
        self.arrived = asyncio.Event()

    async def find(self, path):
        return self.there

    async def call(self, method, path, body):
        version = body["metadata"].get("resourceVersion")
        if self.there is not None and version != self.there["metadata"]["resourceVersion"]:
            raise Conflict(409, "Conflict", "the object has been modified")
        self.version += 1
        self.there = body | {"metadata": body["metadata"] | {"resourceVersion": str(self.version)}}
        if self.stuck:
            self.arrived.set()
            await asyncio.Event().wait()
        return self.there


def election(cluster, identity="a"):
    return Election(cluster, "ns", "lease", identity, Leadership(TIMING))


async def test_a_lease_is_given_back_though_a_renewal_was_cut_off_in_its_middle():
    """Told to stop while a renewal is on its way: the API server has it, and its answer is never read."""
    cluster = OneLease()
    mine = election(cluster)
    await mine.win()
    cluster.stuck = True
    renewal = asyncio.create_task(mine._write(mine._held))
    await cluster.arrived.wait()
    renewal.cancel()
    cluster.stuck = False
    await mine.give_back()
    assert cluster.there["spec"]["holderIdentity"] == ""


async def test_nobody_elses_lease_is_given_back():
    cluster = OneLease()
    mine, theirs = election(cluster), election(cluster, "b")
    await mine.win()
    cluster.there["spec"]["holderIdentity"] = ""
    await theirs.win()
    await mine.give_back()
    assert cluster.there["spec"]["holderIdentity"] == "b"


async def test_a_lease_that_cannot_be_given_back_is_left_to_time():
    cluster = OneLease()
    mine = election(cluster)
    await mine.win()

    async def refuse(*_):
        raise Unreachable("no answer")

    cluster.call = refuse
    await mine.give_back()
    assert cluster.there["spec"]["holderIdentity"] == "a"
