"""The Lease, taken, kept and given back. Losing it ends the process: what it still had in mind is never written."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from dataclasses import dataclass

from sluice_operator.decide import lease
from sluice_operator.decide.lease import Held, Sighting, Timing
from sluice_operator.live.cluster import KINDS, Cluster, ClusterError, Conflict

LOST = 4
GIVE_BACK_ATTEMPTS = 3
log = logging.getLogger(__name__)


def clock() -> float:
    """Seconds that go on while this process is stopped, and while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass
class Leadership:
    """`held_at`: by `clock`, just before the request was sent that last confirmed the lease."""

    timing: Timing
    held_at: float | None = None

    @property
    def age(self) -> float:
        """Raises RuntimeError for one that does not lead."""
        if self.held_at is None:
            raise RuntimeError("a write without leadership")
        return clock() - self.held_at

    def check(self) -> None:
        """Before each write. Does not return if the lease may be another's."""
        if self.held_at is None or clock() - self.held_at >= self.timing.deadline:
            lose()


def lose() -> None:
    # No cleanup, no flush of anything: whatever runs between here and the end might write.
    os.write(2, b"sluice-operator: the lease is lost; another may lead\n")
    os._exit(LOST)


class Election:
    """One identity's part in it. `cluster`: for the Lease only, its writes are not checked by `leadership`."""

    def __init__(self, cluster: Cluster, namespace: str, name: str, identity: str, leadership: Leadership) -> None:
        self.cluster, self.namespace, self.name, self.identity = cluster, namespace, name, identity
        self.leadership = leadership
        self.timing = leadership.timing
        self.path = KINDS["Lease"].path(namespace, name)
        self.looked_at = clock()
        self._held: Held | None = None

    async def win(self) -> None:
        """Returns when this process leads, however long that takes."""
        seen: Sighting | None = None
        while True:
            try:
                there = await self.cluster.find(self.path)
                self.looked_at = now = clock()
                if there is None:
                    if await self._write(None):
                        return
                else:
                    seen = lease.look(seen, lease.read(there), now)
                    if lease.may_take(seen, self.identity, now, self.timing) and await self._write(seen.held):
                        return
            except ClusterError as error:
                log.warning("lease: %s", error)
            await asyncio.sleep(self.timing.period)

    async def keep(self) -> None:
        """Renews for ever; ends the process when it cannot in time."""
        while True:
            await asyncio.sleep(self.timing.period)
            self.leadership.check()
            try:
                if not await self._write(self._held):
                    await self._compare()
            except ClusterError as error:
                log.warning("lease: %s", error)

    async def give_back(self) -> None:
        """So that the next one need not wait. What it fails to do, time does."""
        if self._held is None:
            return
        try:
            for _ in range(GIVE_BACK_ATTEMPTS):
                # A renewal that was cut off may have been carried out, or still be on its way.
                there = await self.cluster.find(self.path)
                if there is None or lease.read(there).holder != self.identity:
                    return
                told = lease.body(self.name, self.namespace, self.identity, lease.read(there), self.timing, time.time())
                told["spec"]["holderIdentity"] = ""
                with contextlib.suppress(Conflict):
                    await self.cluster.call("PUT", self.path, told)
                    return
        except ClusterError as error:
            log.warning("lease: %s", error)

    async def _write(self, held: Held | None) -> bool:
        """False if somebody else was faster."""
        told = lease.body(self.name, self.namespace, self.identity, held, self.timing, time.time())
        before = clock()
        try:
            if held is None:
                there = await self.cluster.call("POST", KINDS["Lease"].path(self.namespace), told)
            else:
                there = await self.cluster.call("PUT", self.path, told)
        except Conflict:
            return False
        self._held, self.leadership.held_at = lease.read(there), before
        return True

    async def _compare(self) -> None:
        """A renewal that timed out may have been carried out: then the version is another, and the holder still we."""
        there = await self.cluster.find(self.path)
        self._held = None if there is None else lease.read(there)
        if self._held is not None and self._held.holder != self.identity:
            lose()
