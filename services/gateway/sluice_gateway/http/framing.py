"""How a body of unknown length goes over a connection: in chunks; to a client of HTTP/1.0, which knows none, as
it is, and the connection's end is its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

Frame = Callable[[bytes], bytes]
Send = Callable[[MutableMapping[str, Any]], Any]
TryWrite = Callable[[bytes], bool]

WITHOUT_CHUNKS = frozenset({"0.9", "1.0"})
BODYLESS = frozenset({204, 304})


def as_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def as_it_is(data: bytes) -> bytes:
    return data


def frame_of(scope: Mapping[str, Any]) -> Frame:
    """What a piece of such a body is on the wire."""
    return as_it_is if scope.get("http_version") in WITHOUT_CHUNKS else as_chunk


def piece_writer(cycle: RequestResponseCycle) -> TryWrite:
    """What `cycle.send` does with a piece of a body that is neither the first nor the last, when it need not wait."""
    frame = frame_of(cycle.scope)

    def try_write(data: bytes) -> bool:
        begun = cycle.response_started and not cycle.response_complete
        if not begun or cycle.flow.write_paused or cycle.disconnected:
            return False
        cycle.transport.write(frame(data))
        return True

    return try_write


class BareSend:
    """Takes the place of `framed`, the `send` of a request by HTTP/1.0. Where the length is told it changes nothing."""

    def __init__(self, cycle: RequestResponseCycle, framed: Send) -> None:
        self._cycle, self._framed = cycle, framed
        self._is_bare = False

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        cycle = self._cycle
        if not cycle.response_started:
            self._is_bare = cycle.scope["method"] != "HEAD" and _is_open(message)
        if not self._is_bare:
            await self._framed(message)
            return
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if cycle.disconnected:
            return
        if not cycle.response_started:
            cycle.response_started = True
            headers = [*cycle.default_headers, *message.get("headers", ()), (b"connection", b"close")]
            cycle.transport.write(response_head(message["status"], headers))
            return
        cycle.transport.write(message.get("body", b""))
        if not message.get("more_body", False):
            cycle.response_complete = True
            cycle.message_event.set()
            cycle.transport.close()
            cycle.on_response()


def _is_open(start: Mapping[str, Any]) -> bool:
    """Whether a response has a body and does not tell its length."""
    names = {name.lower() for name, _ in start.get("headers", ())}
    return start["status"] not in BODYLESS and b"content-length" not in names


def response_head(status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """HTTP/1.1 as it is on the wire, to where the body begins."""
    line = b"HTTP/1.1 %d %b" % (status, HTTPStatus(status).phrase.encode())
    return b"\r\n".join((line, *(b"%b: %b" % header for header in headers), b"", b""))
