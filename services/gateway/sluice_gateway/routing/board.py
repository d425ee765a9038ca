"""What the status page shows: asked of the supervisors, so that a stuck engine is seen all the same.

A supervisor is asked only while a page is open, at most once a second, and for at most a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

import orjson

from sluice_gateway.routing.dispatch import Clock
from sluice_gateway.status.view import Told, stack_view
from sluice_runtime.probe_client import NoAnswer, ask_json

PERIOD_S, TIMEOUT_S = 1.0, 1.0
MAX_WATCHERS = 32
FULL = b"event: full\ndata: {}\n\n"
Report = Callable[[], Mapping[str, Any]]
Ask = Callable[[str, str, float], Awaitable[Any]]


class StatusBoard:
    """`report`: the gateway's own words, with `engines`. `supervisor`: where the gateway's own answers, if any does."""

    def __init__(self, report: Report, supervisor: str, clock: Clock, ask: Ask = ask_json) -> None:
        self.watchers = 0
        self._report = report
        self._supervisor = supervisor
        self._clock = clock
        self._ask = ask
        self._closed = asyncio.Event()
        self._looking: asyncio.Task[dict[str, Any]] | None = None
        self._looked_at = 0.0
        self._names: dict[str, str] = {}  # address -> what its supervisor called it when it last answered

    def close(self) -> None:
        """Streams end, so that they do not hold up a shutdown."""
        self._closed.set()

    async def now(self) -> dict[str, Any]:
        """At most PERIOD_S old: {gateway, services, events}. All callers at one time share one look."""
        now = self._clock()
        if self._looking is None or (self._looking.done() and now - self._looked_at >= PERIOD_S):
            self._looked_at = now
            self._looking = asyncio.create_task(self._look(), name="status")
        return await asyncio.shield(self._looking)

    async def follow(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events, one a second, until `close` or until the caller goes."""
        if self.watchers >= MAX_WATCHERS:
            yield FULL
            return
        self.watchers += 1
        try:
            while not self._closed.is_set():
                yield b"data: " + orjson.dumps(await self.now()) + b"\n\n"
                await self._pause()
        finally:
            self.watchers -= 1

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(PERIOD_S):
                await self._closed.wait()
        except TimeoutError:
            return

    async def _look(self) -> dict[str, Any]:
        report = self._report()
        asked = [self._engine(engine) for engine in report["engines"]]
        if self._supervisor:
            asked.insert(0, self._ask_one("gateway", "gateway", self._supervisor))
        told = await asyncio.gather(*asked)
        own = {key: report[key] for key in ("model", "ready", "reason", "queued", "running", "counters")}
        return {"gateway": own, **stack_view(told)}

    async def _engine(self, engine: Mapping[str, Any]) -> Told:
        address, role, trouble = str(engine["address"]), str(engine["role"]), str(engine["trouble"])
        if not engine["health"]:
            why = trouble if trouble else "it did not say where its supervisor answers"
            return Told(address, role, "", trouble=why, link=trouble)
        told = await self._ask_one(self._names.get(address, address), role, engine["health"], trouble)
        if told.status is not None:
            self._names[address] = str(told.status["name"])
        return told

    async def _ask_one(self, name: str, role: str, url: str, link: str = "") -> Told:
        try:
            status = await self._ask(url, "/status", TIMEOUT_S)
        except NoAnswer as error:
            return Told(name, role, url, trouble=str(error), link=link)
        if not isinstance(status, dict) or "verdict" not in status:
            return Told(name, role, url, trouble=f"{url} is no supervisor of Sluice", link=link)
        return Told(name, role, url, status, link=link)
