"""A stream of events. It ends for a client that does not read, which would hold its place without end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from starlette.responses import Response

from sluice_gateway.http.framing import Frame, frame_of
from sluice_gateway.http.respond import ABORT, Message, Receive, Send, gone
from sluice_gateway.status.counters import Counters

UNSENT = "sluice.unsent"
"""Scope extension of our server: a function that tells how many bytes the client's machine has not acknowledged."""

# A piece that has not gone out for so long has no reader: a few seconds are a bad network's, not a browser's.
STALLED_S = 10.0


class Stalled(Exception):
    """The client does not read, or is not there any more."""


class Outgoing:
    """What was written to one client and when. `unsent`: bytes that have not gone out. `clock`: seconds."""

    def __init__(self, unsent: Callable[[], int], clock: Callable[[], float]) -> None:
        self._unsent = unsent
        self._clock = clock
        self._written = 0
        self._pieces: deque[tuple[int, float]] = deque()  # bytes up to its end, when

    def wrote(self, nbytes: int) -> None:
        self._written += nbytes
        self._pieces.append((self._written, self._clock()))

    def check(self) -> None:
        """Raises Stalled when the oldest piece that is still on its way has been so for longer than STALLED_S."""
        sent = self._written - self._unsent()
        while self._pieces and self._pieces[0][0] <= sent:
            self._pieces.popleft()
        if self._pieces and self._clock() - self._pieces[0][1] > STALLED_S:
            raise Stalled


def _nothing() -> int:
    return 0


class EventResponse(Response):
    """Writes `events` until they end or the client goes; one that does not read is dropped, and counted."""

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str], counters: Counters) -> None:
        super().__init__(media_type="text/event-stream", headers=dict(headers))
        del self.headers["content-length"]
        self._events = events
        self._counters = counters

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        extensions = scope.get("extensions") or {}
        outgoing = Outgoing(extensions.get(UNSENT, _nothing), asyncio.get_running_loop().time)
        writing = asyncio.create_task(self._write(send, outgoing, frame_of(scope)))
        leaving = asyncio.create_task(gone(receive))
        try:
            await asyncio.wait((writing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        except (Stalled, TimeoutError):
            self._counters.slow_clients += 1
            if (abort := extensions.get(ABORT)) is not None:
                abort()
        finally:
            writing.cancel()
            leaving.cancel()
            await asyncio.gather(writing, leaving, return_exceptions=True)
            await self._events.aclose()

    async def _write(self, send: Send, outgoing: Outgoing, frame: Frame) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._events:
            outgoing.check()
            message: Message = {"type": "http.response.body", "body": data, "more_body": True}
            async with asyncio.timeout(STALLED_S):
                await send(message)
            outgoing.wrote(len(frame(data)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
