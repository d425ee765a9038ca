"""The engines, from the EndpointSlices of their Services: listed once, then watched until the gateway ends.

What was seen last stays while the API server is away or talks nonsense: engines do not end because the API server does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from time import monotonic
from typing import Any, Protocol

from sluice_gateway.routing.fleet import Fleet, Member
from sluice_gateway.routing.slices import LINGER_S, Endpoint, Present, addresses_of, read_slice

FIRST_BACKOFF_S, MOST_BACKOFF_S = 0.5, 15.0
# What a watch may have missed without a word is made up for by a listing.
RELIST_S = 300.0
# One that ends at once is not begun again at once.
SHORTEST_WATCH_S = 1.0
logger = logging.getLogger(__name__)


class ApiFailed(Exception):
    """No answer, or none that makes sense; the message says which, and the remedy where there is one."""


class Expired(ApiFailed):
    """410: that version is forgotten, so all has to be listed anew."""


class SliceApi(Protocol):
    """Both raise ApiFailed and nothing else."""

    async def listed(self) -> tuple[list[Any], str]:
        """(all slices, the version to watch from)."""

    def watched(self, version: str) -> AsyncIterator[Mapping[str, Any]]:
        """Events as the API server sends them; ends now and then by itself, to be begun again from the last version."""


@dataclass(frozen=True, slots=True)
class Target:
    """`services`: whose EndpointSlices are looked at."""

    namespace: str
    services: tuple[str, ...]

    @property
    def selector(self) -> str:
        return f"kubernetes.io/service-name in ({','.join(self.services)})"


def parse_target(text: str) -> Target:
    """`NAMESPACE/SERVICE[,SERVICE...]`. Raises ValueError."""
    namespace, _, rest = text.partition("/")
    services = tuple(service for service in rest.split(",") if service)
    if not namespace or not services or "/" in rest:
        raise ValueError(f"--discover {text!r}: say NAMESPACE/SERVICE, or NAMESPACE/SERVICE,SERVICE")
    return Target(namespace, services)


class Discovery:
    """`set_fleet` is called whenever another set of addresses is known. `trouble`: why nothing new is heard."""

    def __init__(
        self,
        api: SliceApi,
        set_fleet: Callable[[Fleet], None],
        prefer_v6: bool = False,
        clock: Callable[[], float] = monotonic,
        random: Random | None = None,
    ) -> None:
        self.trouble = "nothing was listed yet"
        self._api, self._set_fleet, self._prefer_v6 = api, set_fleet, prefer_v6
        self._clock, self._random = clock, random or Random()
        self._slices: dict[str, tuple[Endpoint, ...]] = {}
        self._present = Present()
        self._timer: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        backoff = FIRST_BACKOFF_S
        while True:
            try:
                await self._follow()
                backoff = FIRST_BACKOFF_S
            except Expired as error:
                logger.info("discovery: %s: listing anew", error)
                backoff = FIRST_BACKOFF_S
            except ApiFailed as error:
                # After a listing it is another trouble than before, and is not waited for as long.
                backoff = backoff if self.trouble else FIRST_BACKOFF_S
                self._complain(str(error))
            except Exception as error:  # a defect of ours ends this round, never the loop
                logger.exception("discovery")
                self._complain(repr(error))
            await asyncio.sleep(backoff * self._random.uniform(0.5, 1.0))
            backoff = min(2 * backoff, MOST_BACKOFF_S)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _complain(self, trouble: str) -> None:
        """Once for as long as it is the same."""
        if trouble != self.trouble:
            kept = len(self._present.addresses)
            logger.warning("discovery: %s; the %d engines that were seen last stay", trouble, kept)
        self.trouble = trouble

    async def _follow(self) -> None:
        """Until it is time to list again."""
        items, version = await self._api.listed()
        listed_at = self._clock()
        self._replace(items)
        if self.trouble:
            logger.info("discovery: %d engines", len(self._present.addresses))
        self.trouble = ""
        while self._clock() - listed_at < RELIST_S:
            began = self._clock()
            async for event in self._api.watched(version):
                version = self._apply(event) or version
            await asyncio.sleep(max(0.0, SHORTEST_WATCH_S - (self._clock() - began)))

    def _replace(self, items: Iterable[Any]) -> None:
        self._slices = {name_of(item): read_slice(item) for item in items}
        self._publish()

    def _apply(self, event: Mapping[str, Any]) -> str:
        """The version that it came with."""
        kind, item = event.get("type"), event.get("object")
        if kind == "ERROR":
            raise failure_of(item)
        if kind not in ("ADDED", "MODIFIED", "DELETED", "BOOKMARK") or not isinstance(item, Mapping):
            raise ApiFailed(f"an event of type {str(kind)[:40]!r} came through the watch")
        if kind == "DELETED":
            self._slices.pop(name_of(item), None)
        elif kind != "BOOKMARK":
            self._slices[name_of(item)] = read_slice(item)
        self._publish()
        return version_of(item)

    def _publish(self) -> None:
        told = addresses_of(self._slices.values(), self._prefer_v6)
        before, self._present = self._present, self._present.then(told, self._clock())
        if self._present.addresses != before.addresses:
            self._set_fleet(Fleet(tuple(Member(None, address) for address in sorted(self._present.addresses))))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._present.missing:
            self._timer = asyncio.get_running_loop().call_later(LINGER_S, self._publish)


def failure_of(status: object) -> ApiFailed:
    """What a Status object means."""
    told = status if isinstance(status, Mapping) else {}
    text = f"{told.get('code')} {told.get('reason')}: {str(told.get('message'))[:300]}"
    return Expired(text) if told.get("code") == 410 else ApiFailed(text)


def name_of(item: Any) -> str:
    meta = item.get("metadata") if isinstance(item, Mapping) else None
    return str(meta.get("name")) if isinstance(meta, Mapping) else ""


def version_of(item: Mapping[str, Any]) -> str:
    meta = item.get("metadata")
    return str(meta.get("resourceVersion") or "") if isinstance(meta, Mapping) else ""


@asynccontextmanager
async def discovering(discovery: Discovery) -> AsyncIterator[Discovery]:
    task = asyncio.create_task(discovery.run(), name="discovery")
    try:
        yield discovery
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        discovery.close()
