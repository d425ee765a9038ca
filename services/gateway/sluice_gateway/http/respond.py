"""ASGI responses that end the work when the client goes away, and never look complete when they are not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

from starlette.responses import Response

from sluice_gateway.http.framing import TryWrite
from sluice_gateway.http.keep_alive import COMMENT, Pace, Ticker
from sluice_gateway.openai.errors import ApiError, internal, unavailable
from sluice_gateway.status.counters import Counters

logger = logging.getLogger(__name__)

T = TypeVar("T")
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

ABORT = "sluice.abort"
"""Scope extension of our server: a function that drops the connection at once."""

CHUNK = "sluice.chunk"
"""Scope extension of our server: a function that writes a piece of a body that has begun straight to the socket's
transport. False, and nothing written: not begun, ended, or the client is behind; then `send` is the way."""


class ClientGone(Exception):
    """The client disconnected, so no answer can be sent."""


def api_error(error: BaseException) -> ApiError:
    """Whatever ended the work, as the client is told it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return unavailable("The gateway is shutting down.", "shutting_down")
    logger.error("a request failed", exc_info=error)
    return internal()


async def gone(receive: Receive) -> None:
    """Return when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_there(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client disconnects before. Raises ClientGone then."""
    working, watch = asyncio.create_task(work), asyncio.create_task(gone(receive))
    try:
        await asyncio.wait({working, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, watch):
            task.cancel()
        await asyncio.gather(working, watch, return_exceptions=True)


async def send_whole(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _refuse(_data: bytes) -> bool:
    return False


class _WorkResponse(Response):
    """Runs `work` beside the client's presence. Starlette calls it; it is its own body."""

    def __init__(self, counters: Counters, request_id: str) -> None:
        super().__init__()
        self._counters = counters
        self._request_id = request_id.encode()
        self._wake: asyncio.Future[None] | None = None

    def _ring(self, _task: object = None) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _start(self, work: Coroutine[Any, Any, Any], receive: Receive) -> tuple[asyncio.Task[Any], asyncio.Task[None]]:
        tasks = asyncio.create_task(work), asyncio.create_task(gone(receive))
        for task in tasks:
            task.add_done_callback(self._ring)
        return tasks

    async def _sleep(self) -> None:
        self._wake = asyncio.get_running_loop().create_future()
        await self._wake
        self._wake = None

    async def _stop(self, work: asyncio.Task[Any], watch: asyncio.Task[None]) -> None:
        work.cancel()
        watch.cancel()
        await asyncio.gather(work, watch, return_exceptions=True)

    def _count_end(self, error: ApiError | None) -> None:
        if error is None:
            self._counters.answered += 1
        elif error.status < 500:
            self._counters.refused += 1
        else:
            self._counters.failed += 1

    async def _send_error(self, send: Send, error: ApiError) -> None:
        headers = [*error.headers(), (b"x-request-id", self._request_id)]
        await send_whole(send, error.status, headers, error.body())


class WholeResponse(_WorkResponse):
    """`work` makes the body of a 200."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, bytes]], counters: Counters, request_id: str) -> None:
        super().__init__(counters, request_id)
        self._work = work

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        work, watch = self._start(self._work(), receive)
        try:
            while not work.done() and not watch.done():
                await self._sleep()
            if not work.done():
                self._counters.disconnected += 1
                return
            failure = asyncio.CancelledError() if work.cancelled() else work.exception()
            error = None if failure is None else api_error(failure)
            self._count_end(error)
            if error is not None:
                await self._send_error(send, error)
                return
            headers = [(b"content-type", b"application/json"), (b"x-request-id", self._request_id)]
            await send_whole(send, 200, headers, work.result())
        finally:
            await self._stop(work, watch)


class StreamResponse(_WorkResponse):
    """`work` writes events with the function it is given; the headers go out with the first of them, or after a while
    (`pace`), with comments from then on for as long as the request `goes_on`.

    Once they are out, an event goes to the socket's transport at once: a system call each, with uvloop 0.23.
    What it does not take (CHUNK) waits for the pump, one task per client. A client that does not read stops that task;
    when `limit` bytes wait for it, it is dropped.
    """

    def __init__(
        self,
        work: Callable[[Callable[[bytes], None]], Coroutine[Any, Any, None]],
        counters: Counters,
        request_id: str,
        limit: int,
        pace: Pace,
        goes_on: Callable[[], bool],
    ) -> None:
        super().__init__(counters, request_id)
        self._work = work
        self._limit = limit
        self._pace, self._goes_on = pace, goes_on
        self._is_head_due = self._is_open = False
        self._ticker: Ticker | None = None
        self._buffer: list[bytes] = []
        self._waiting = 0
        self._overflow: Callable[[], None] | None = None
        self._try_write: TryWrite = _refuse

    def _write(self, data: bytes) -> None:
        wake = self._wake
        if self._ticker is not None:
            self._ticker.has_data = True
        # The pump sleeps: all that came before is with the transport.
        if wake is not None and not wake.done() and self._try_write(data):
            return
        self._buffer.append(data)
        self._waiting += len(data)
        if wake is not None:
            if not wake.done():
                wake.set_result(None)
        elif self._waiting > self._limit and self._overflow is not None:
            self._overflow()

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        extensions = scope.get("extensions") or {}
        self._try_write = extensions.get(CHUNK, _refuse)
        work, watch = self._start(self._work(self._write), receive)
        pump = asyncio.create_task(self._pump(work, watch, send))
        self._ticker = Ticker(self._pace, self._open_head, self._comment, self._goes_on)
        overflowed = False

        def overflow() -> None:
            nonlocal overflowed
            overflowed = True
            self._overflow = None
            pump.cancel()

        self._overflow = overflow
        try:
            await asyncio.wait([pump])
            if not overflowed:
                pump.result()
                return
            self._counters.slow_clients += 1
            abort = extensions.get(ABORT)
            if abort is not None:
                abort()
        finally:
            self._ticker.stop()
            pump.cancel()
            self._buffer.clear()
            await self._stop(work, watch)

    def _open_head(self) -> None:
        self._is_head_due = True
        self._ring()

    def _comment(self) -> None:
        if self._is_open:
            self._write(COMMENT)

    async def _pump(self, work: asyncio.Task[Any], watch: asyncio.Task[None], send: Send) -> None:
        buffer = self._buffer
        while True:
            if watch.done() and not work.done():
                self._counters.disconnected += 1
                return
            if buffer:
                await self._begin(send)
                data = b"".join(buffer)
                buffer.clear()
                await send({"type": "http.response.body", "body": data, "more_body": True})
                self._waiting = sum(map(len, buffer))
            elif work.done():
                break
            elif self._is_head_due and not self._is_open:
                await self._begin(send)
                self._write(COMMENT)
            else:
                await self._sleep()
        await self._finish(work, send)

    async def _begin(self, send: Send) -> None:
        if not self._is_open:
            self._is_open = True
            await send(self._head())

    def _head(self) -> Message:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            (b"x-request-id", self._request_id),
        ]
        return {"type": "http.response.start", "status": 200, "headers": headers}

    async def _finish(self, work: asyncio.Task[Any], send: Send) -> None:
        """An error behind the head is an event of its own, and no [DONE] follows it."""
        failure = asyncio.CancelledError() if work.cancelled() else work.exception()
        error = None if failure is None else api_error(failure)
        self._count_end(error)
        if error is not None and not self._is_open:
            await self._send_error(send, error)
            return
        last = b"" if error is None else error.event()
        await send({"type": "http.response.body", "body": last, "more_body": False})
