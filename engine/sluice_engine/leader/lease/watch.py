"""The reader's look at its sources while no client asks for anything: a Hello and a READ of one record each.

A lane that is cut between two engines that are well would otherwise be found by a client, at the cost of its patience.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from sluice_engine.leader.lease.thread import LeaseThread

if TYPE_CHECKING:
    from sluice_engine.leader.lease.connections import Connections

# Between two looks at the same sources, and what each of many adds to it; after a failure the next look comes sooner.
PERIOD_S, EACH_S, DOUBT_S = 1.0, 0.1, 0.5
TRY_S = 1.5
# A source is forgotten FORGET_S after its last lease, or after a gateway last named it. One that fails is forgotten
# sooner, for it may never come back: after SILENT_S if it does not answer (gateways name their fleet every minute),
# and after GONE_S if nothing listens there.
FORGET_S, SILENT_S, GONE_S = 600.0, 150.0, 30.0
# An address is a host's name and a port.
MAX_ADDRESS = 300


class BadSource(Exception):
    """The source at this address cannot be read from: `reason` and what differs."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


class SourceWatch:
    """All of it runs on the lease loop; what it finds is told on the leader's."""

    def __init__(
        self,
        thread: LeaseThread,
        connections: Connections,
        on_pair: Callable[[str, str, str], None],
        forget: Callable[[str], None],
        ping: Callable[[str, str], None],
    ) -> None:
        """`on_pair(source, reason, detail)`: a look at it failed. `ping(source, incarnation)`: its Hello came, now try
        the lane. `forget(source)`: it is looked at no more."""
        self._thread, self._connections = thread, connections
        self._on_pair, self._forget, self._ping = on_pair, forget, ping
        self._used: dict[str, float] = {}
        self._answered: dict[str, float] = {}
        self._doubts = False

    def use(self, source: str) -> None:
        """A lease of this source begins, or may be wanted."""
        if not 0 < len(source) <= MAX_ADDRESS:
            return
        self._used[source] = asyncio.get_running_loop().time()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(DOUBT_S if self._doubts else max(PERIOD_S, EACH_S * len(self._used)))
            self._doubts = False
            await asyncio.gather(*(self._look_at(source) for source in list(self._used)))

    async def _look_at(self, source: str) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._used[source] > FORGET_S:
            self._drop(source)
            return
        reason, detail = await self._try(source)
        if not reason:
            self._answered[source] = now
            return
        self._doubts = True
        last = max(self._used[source], self._answered.get(source, 0.0))
        if now - last > (GONE_S if reason == "SourceLost" else SILENT_S):
            self._drop(source)
        else:
            self._thread.tell_leader(self._on_pair, source, reason, detail)

    async def _try(self, source: str) -> tuple[str, str]:
        """(reason, detail) of what went wrong; empty where the lane is being tried."""
        connections = self._connections
        try:
            connection = connections.enter(source)
        except Exception as error:
            return _why(error)
        try:
            async with asyncio.timeout(TRY_S):
                hello = await asyncio.shield(connection.hello)
                again = await connections.ask_hello(connection.stub, TRY_S)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not connection.hello.cancelled():
                raise  # This watch is ended, not its source's Hello.
            connections.distrust(source, connection)
            return _why(error)
        finally:
            await connections.leave(connection)
        if again.incarnation != hello.incarnation:
            connections.distrust(source, connection)  # The next look, or lease, meets the new one.
        else:
            self._thread.tell_leader(self._ping, source, hello.incarnation)
        return "", ""

    def _drop(self, source: str) -> None:
        self._used.pop(source, None)
        self._answered.pop(source, None)
        self._thread.tell_leader(self._forget, source)


def _why(error: BaseException) -> tuple[str, str]:
    if isinstance(error, BadSource):
        return error.reason, error.detail
    if isinstance(error, TimeoutError):
        return "SourceSilent", f"it has not answered Hello within {TRY_S} s"
    return "SourceLost", f"{type(error).__name__}: {error}"
