"""A uvicorn server on a socket of ours that says when it accepts and stops within a bound."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import signal
import socket
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from sluice_engine.address import join, split
from sluice_gateway.connections import HEAD_TOO_LARGE, MAX_HEAD_BYTES, TOO_MANY, Idle, most_connections
from sluice_gateway.counters import Counters
from sluice_gateway.gateway import Gateway
from sluice_gateway.respond import ABORT, CHUNK, TryWrite
from sluice_gateway.watcher import UNSENT

logger = logging.getLogger(__name__)
EVERY_HOST = "*"


class StreamingProtocol(HttpToolsProtocol):
    """Gives the application a way to drop a client that does not read, and a short one to write to one that does.

    One that does not say in `head_s` what it wants is dropped, and one that needs too many words for it. Where there
    are more than `most`, the one that has been idle longest gives way; where all are at work, the new one is told to
    come again."""

    def __init__(
        self, *args: Any, idle: Idle[StreamingProtocol], most: int, head_s: float, counters: Counters, **more: Any
    ) -> None:
        super().__init__(*args, **more)
        self._idle, self._most, self._head_s, self._counters = idle, most, head_s, counters
        self._late: asyncio.TimerHandle | None = None  # while a head is awaited
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle.begin(self)
        self._await_head()
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
        self._head_is_there()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._late is None or self.transport.is_closing():
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._counters.dropped_connections += 1
            if self._is_serving():
                self.transport.abort()  # an answer goes on: no other may begin in its midst
            else:
                self.transport.write(HEAD_TOO_LARGE)
                self.transport.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        """What comes behind a body is nobody's."""
        if self._late is not None:
            super().on_header(name, value)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.timeout_keep_alive_task is not None:
            self._idle.begin(self)

    def _await_head(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self._head_s, self._drop)

    def _head_is_there(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late, self._head_bytes = None, 0

    def _is_serving(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _drop(self) -> None:
        self._late = None
        if self._is_serving():  # half of the next request came meanwhile: it has its time after this one
            self._await_head()
            return
        self._counters.dropped_connections += 1
        self.transport.abort()

    def on_headers_complete(self) -> None:
        self._head_is_there()
        self._idle.end(self)
        extensions: dict[str, Any] = {ABORT: self.transport.abort, UNSENT: partial(unsent_bytes, self.transport)}
        self.scope["extensions"] = extensions  # type: ignore[typeddict-item]
        super().on_headers_complete()
        # The application runs in a task that has not begun. An upgrade that is refused has no cycle.
        if self.cycle is not None and self.cycle.scope is self.scope:
            extensions[CHUNK] = chunk_writer(self.cycle)


def unsent_bytes(transport: asyncio.Transport) -> int:
    """Written, and not acknowledged by the client's machine: in our buffer and in the kernel's."""
    try:
        queued = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    except (OSError, ValueError):  # it is closed
        return 0
    return transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)


def chunk_writer(cycle: RequestResponseCycle) -> TryWrite:
    """What `cycle.send` does with a piece of a body that is neither the first nor the last, when it need not wait."""

    def try_write(data: bytes) -> bool:
        begun = cycle.chunked_encoding and cycle.response_started and not cycle.response_complete
        if not begun or cycle.flow.write_paused or cycle.disconnected:
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    return try_write


class Server(uvicorn.Server):
    """Signals set a flag and the process exits with 0: uvicorn's own handlers would end it by the signal."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._on_ready = on_ready
        self._stopper: asyncio.TimerHandle | None = None
        self._asked = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """What runs may finish until just before the bound; then it ends with an error that the clients can read."""
        self._gateway.board.close()
        bound = self._gateway.settings.shutdown_s
        self._stopper = asyncio.get_running_loop().call_later(0.8 * bound, self._gateway.stop)
        try:
            await super().shutdown(sockets)
        finally:
            self._stopper.cancel()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handled = (signal.SIGINT, signal.SIGTERM)
        try:
            for number in handled:
                loop.add_signal_handler(number, self._on_signal, number)
        except (ValueError, RuntimeError):  # not the main thread: whoever runs us calls `ask_to_exit`
            yield
            return
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        logger.warning("stopping: %s", number.name)
        self.ask_to_exit()

    async def main_loop(self) -> None:
        """A turn per second keeps the Date header right; being asked to exit wakes it at once."""
        while not await self.on_tick(0):
            try:
                async with asyncio.timeout(1.0):
                    await self._asked.wait()
            except TimeoutError:
                continue

    def ask_to_exit(self) -> None:
        self.should_exit = True
        self._asked.set()


def listen(address: str) -> socket.socket:
    """A bound socket for `host:port`; port 0 lets the system choose; host `*` is every address, of IPv6 too where the
    machine has it.

    TCP_NODELAY is inherited by what is accepted: without it every answer of two writes waits 40 ms for an ACK.
    """
    host, port = split(address)
    both = host == EVERY_HOST and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    sock = socket.create_server(
        ("" if host == EVERY_HOST else host, int(port)), family=family, backlog=2048, dualstack_ipv6=both
    )
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setblocking(False)
    return sock


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://{join(host, port)}"


def make_server(app: FastAPI, on_ready: Callable[[], None]) -> Server:
    gateway: Gateway = app.state.gateway
    config = uvicorn.Config(
        app,
        http=partial(
            StreamingProtocol,
            idle=Idle(),
            most=gateway.settings.max_connections or most_connections(),
            head_s=gateway.settings.head_timeout_s,
            counters=gateway.counters,
        ),  # type: ignore[arg-type] # it is called, and nothing else
        ws="none",
        loop="uvloop",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(gateway.settings.shutdown_s)),
    )
    return Server(config, gateway, on_ready)
