"""The set of links: one per member of the fleet, which may change at any time."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from sluice_gateway.routing.engine import ClientFactory
from sluice_gateway.routing.fleet import Fleet, FleetError, Member, parse_fleet
from sluice_gateway.routing.link import Link, Timings
from sluice_gateway.status.histograms import Latencies
from sluice_protocol.generate import EngineHello, Role

logger = logging.getLogger(__name__)


# A reader looks after so many sources at most that it has never leased from: a READ of each, every 0.1 s one.
MOST_NAMED = 64


class Members:
    """Owns the links and the tasks that keep them up. A member that leaves loses its tries, which are retried."""

    def __init__(
        self,
        clients: ClientFactory,
        gateway_id: str,
        on_change: Callable[[], None],
        timings: Timings,
        elsewhere: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = monotonic,
        latencies: Latencies | None = None,
    ) -> None:
        self._clock = clock
        self._latencies = latencies
        self.links: dict[str, Link] = {}
        self._clients = clients
        self._gateway_id = gateway_id
        self._on_change = on_change
        self._timings = timings
        self._elsewhere = elsewhere
        self._tasks: dict[Member, asyncio.Task[None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    def set_fleet(self, fleet: Fleet) -> None:
        """Members that stay keep their connection."""
        for member in [m for m in self._tasks if m not in fleet.members]:
            task = self._tasks.pop(member)
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
            task.cancel()
            del self.links[member.address]
        for member in fleet.members:
            if member not in self._tasks:
                link = self._link(member)
                self.links[member.address] = link
                self._tasks[member] = asyncio.create_task(link.run(), name=f"link {member.address}")

    def _link(self, member: Member) -> Link:
        own = (self._gateway_id, self._on_change, self._timings, self._elsewhere, self._clock, self._latencies)
        return Link(member, self._clients, *own, self._sources)

    def _sources(self, reader: EngineHello) -> tuple[str, ...]:
        """Addresses of the prefill engines that a decode engine with this Hello may be sent to: it tries the lane to
        each of them before a client does."""
        if reader.role is not Role.DECODE:
            return ()
        views = [link.view for link in self.links.values()]
        addresses = {
            view.hello.source_address
            for view in views
            if view.hello is not None and view.role is Role.PREFILL and view.hello.fingerprint == reader.fingerprint
        }
        return tuple(sorted(addresses - {""})[:MOST_NAMED])

    async def close(self) -> None:
        tasks = [*self._tasks.values(), *self._leaving]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def read_fleet(path: Path) -> Fleet:
    """Raises FleetError."""
    try:
        return parse_fleet(json.loads(path.read_text()))
    except (OSError, ValueError, RecursionError) as error:
        raise FleetError(f"{path}: {error}") from error


def _stamp(path: Path) -> tuple[int, int, int]:
    """Changes when the file does."""
    try:
        status = path.stat()
    except OSError:
        return (0, 0, 0)
    return (status.st_mtime_ns, status.st_size, status.st_ino)


async def watch_fleet(path: Path, set_fleet: Callable[[Fleet], None], every_s: float) -> None:
    """Re-read the file when it changes, for ever. A file that cannot be read leaves the fleet as it is, logged once."""
    seen: tuple[int, int, int] | None = None
    while True:
        stamp = _stamp(path)
        if stamp != seen:
            seen = stamp
            try:
                set_fleet(read_fleet(path))
            except FleetError as error:
                logger.warning("fleet file: %s", error)
            except Exception:  # a defect of ours ends this round, never the loop
                logger.exception("fleet file")
        await asyncio.sleep(every_s)
