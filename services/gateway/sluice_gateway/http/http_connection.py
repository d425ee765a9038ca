"""One client's connection: what it may take its time for, and what of it is no HTTP."""

from __future__ import annotations

import asyncio
import fcntl
import select
import sys
import termios
from functools import partial
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from sluice_gateway.http.connections import (
    HEAD_TOO_LARGE,
    MAX_HEAD_BYTES,
    TOO_MANY,
    Bounds,
    Deadline,
    Idle,
    answer_before_a_request,
)
from sluice_gateway.http.framing import WITHOUT_CHUNKS, BareSend, piece_writer
from sluice_gateway.http.respond import ABORT, CHUNK, Send, send_whole
from sluice_gateway.http.watcher import UNSENT
from sluice_gateway.openai.errors import ApiError, not_http
from sluice_gateway.status.counters import Counters

LOOK_S = 0.25
SPOKEN = WITHOUT_CHUNKS | {"1.1"}


class NotHttp(Exception):
    """Ends the parsing of a request that has been refused."""


class StreamingProtocol(HttpToolsProtocol):
    """Gives the application a way to drop a client that does not read, and a short one to write to one that does.

    One that does not say in time what it wants is dropped, one that needs too many words for it, and one that does not
    read what it is told. Where there are too many, the one that has been idle longest gives way; where all are at work,
    the new one is told to come again."""

    def __init__(
        self, *args: Any, idle: Idle[StreamingProtocol], bounds: Bounds, counters: Counters, **more: Any
    ) -> None:
        super().__init__(*args, **more)
        self._idle, self._counters = idle, counters
        self._most = bounds.most
        self._head = Deadline(bounds.head_s, self._drop)
        self._head_bytes = 0
        self._reading = Deadline(bounds.read_s, self._drop_unread)  # of the client, what was written
        self._looking = Deadline(LOOK_S, self._look)
        self._working: RequestResponseCycle | None = None
        self._refusal: bytes | None = None  # of what came last, written when all before it is answered

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle.begin(self)
        self._head.begin()
        if len(self.connections) > self._most:
            self._counters.dropped_connections += 1
            other = self._idle.longest(but=self)
            if other is not None:
                other.transport.abort()
            else:
                transport.write(TOO_MANY)
                transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle.end(self)
        self._head.end()
        super().connection_lost(exc)
        self._reading.end()
        self._looking.end()
        working = self._working  # not the one above, where more was asked for behind it
        if working is not None and not working.response_complete:
            working.disconnected = True
            working.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._working = cycle
        super()._start_asgi_task(cycle, app)

    def _look(self) -> None:
        """Notice a client that leaves while its request waits behind another: nothing is read from it then."""
        if not self.flow.read_paused or not self._is_serving():
            return
        if has_hung_up(self.transport):
            self.transport.abort()
        else:
            self._looking.begin()

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._unset_keepalive_if_required()
        self._parse(data)
        if not self._head.runs or self.transport.is_closing():
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._counters.dropped_connections += 1
            if self._is_serving():
                self.transport.abort()  # an answer goes on: no other may begin in its midst
            else:
                self.transport.write(HEAD_TOO_LARGE)
                self.transport.close()

    def _parse(self, data: bytes) -> None:
        """Once the parser gives up, nothing that comes later on this connection can be understood."""
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as offer:
            self._pass_over(data[offer.args[0] :])
        except HttpParserError:
            self._refuse(not_http("check its first line, its headers, and the lengths or chunks of its body."))

    def _pass_over(self, rest: bytes) -> None:
        """Another protocol was offered. The parser takes the offer, and the body for that protocol's: a new one reads
        the request as if it had made none."""
        head = head_without_offer(self.parser, self.url, self.headers)
        self.parser = HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as the one before
        self._parse(head + rest)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _refuse(self, error: ApiError) -> None:
        """What was asked before has its answer first; a request whose own body breaks off has this one."""
        if self._refusal is not None:
            return
        self._refusal = answer_before_a_request(error)
        self._counters.refused += 1
        if not self._is_serving():
            self._tell_refusal()
        elif not self.cycle.more_body:
            return
        elif self.pipeline:
            cycle, _ = self.pipeline.popleft()
            self.pipeline.appendleft((cycle, refusing(error)))
        elif self.cycle.response_started:
            self.transport.abort()  # an answer goes on: no other may begin in its midst
        else:
            self._tell_refusal()

    def _tell_refusal(self) -> None:
        if self._refusal is None or self.transport.is_closing():
            return
        self.transport.write(self._refusal)
        self.transport.close()
        self._close_in_time()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Bytes that come behind a body are dropped."""
        if self._head.runs:
            super().on_header(name, value)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading.begin()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reading.end()

    def timeout_keep_alive_handler(self) -> None:
        self._close_in_time()
        super().timeout_keep_alive_handler()

    def _close_in_time(self) -> None:
        """A connection that is closed waits for what was written: not for ever."""
        if self.transport.get_write_buffer_size():
            self._reading.begin()

    def _drop_unread(self) -> None:
        self._counters.slow_clients += 1
        self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head.begin()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._close_in_time()
        elif self._refusal is not None and not self._is_serving():
            self._tell_refusal()
        elif self.timeout_keep_alive_task is not None:
            self._idle.begin(self)

    def _is_serving(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _drop(self) -> None:
        if self._is_serving():  # half of the next request came meanwhile: it has its time after this one
            self._head.begin()
            return
        self._counters.dropped_connections += 1
        self.transport.abort()

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        hosts = sum(name == b"host" for name, _ in self.headers)
        if version not in SPOKEN:
            self._refuse(not_http(f"its version is {version}; use 1.1."))
        elif version == "1.1" and hosts != 1:
            self._refuse(not_http(f"it has {hosts} headers Host; send one."))
        elif version in WITHOUT_CHUNKS and any(name == b"transfer-encoding" for name, _ in self.headers):
            self._refuse(not_http("HTTP/1.0 has no Transfer-Encoding; send a Content-Length, or use 1.1."))
        elif self.parser.get_method() == b"CONNECT":
            self._refuse(not_http("CONNECT is for proxies."))
        if self._refusal is not None:
            raise NotHttp  # the parser stops, and calls no more
        if self.parser.should_upgrade():
            return  # it comes again
        self._head.end()
        self._head_bytes = 0
        self._idle.end(self)
        extensions: dict[str, Any] = {ABORT: self.transport.abort, UNSENT: partial(unsent_bytes, self.transport)}
        self.scope["extensions"] = extensions  # type: ignore[typeddict-item]
        if version in WITHOUT_CHUNKS:
            self.expect_100_continue = False  # it does not know that answer either
        super().on_headers_complete()
        # The application runs in a task that has not begun. An upgrade that is refused has no cycle.
        if self.cycle is not None and self.cycle.scope is self.scope:
            extensions[CHUNK] = piece_writer(self.cycle)
            if version in WITHOUT_CHUNKS:
                self.cycle.send = BareSend(self.cycle, self.cycle.send)  # type: ignore[method-assign, assignment, arg-type]
        if self.pipeline:
            self._looking.begin()


def head_without_offer(parser: HttpRequestParser, url: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Of the request that `parser` has just read."""
    lines = [b"%b %b HTTP/%b" % (parser.get_method(), url, parser.get_http_version().encode())]
    for name, value in headers:
        if name == b"connection":
            value = b", ".join(token for token in value.split(b",") if token.strip().lower() != b"upgrade")
        if name != b"upgrade":
            lines.append(b"%b: %b" % (name, value))
    return b"\r\n".join((*lines, b"", b""))


def refusing(error: ApiError) -> Any:
    """An ASGI application that answers with `error`, and ends the connection."""

    async def app(_scope: object, _receive: object, send: Send) -> None:
        headers = [*error.headers(), (b"connection", b"close")]
        await send_whole(send, error.status, headers, error.body())

    return app


def has_hung_up(transport: asyncio.Transport) -> bool:
    """Whether the client's machine has ended its half of the connection or all of it, also behind what is not read."""
    poll = select.poll()
    try:
        poll.register(transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        return bool(poll.poll(0))
    except (OSError, ValueError):  # it is closed
        return True


def unsent_bytes(transport: asyncio.Transport) -> int:
    """Written, and not acknowledged by the client's machine: in our buffer and in the kernel's."""
    try:
        queued = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    except (OSError, ValueError):  # it is closed
        return 0
    return transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)
