"""A uvicorn server on a socket of ours that says when it accepts and stops within a bound."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import uvicorn
from fastapi import FastAPI

from sluice_gateway.gateway import Gateway
from sluice_gateway.http.connections import Bounds, Idle, most_connections
from sluice_gateway.http.cors import with_cors
from sluice_gateway.http.http_connection import StreamingProtocol
from sluice_gateway.settings import Settings
from sluice_runtime.address import join, split

logger = logging.getLogger(__name__)
EVERY_HOST = "*"
# For what would hold the loop: the tokeniser, block keys, messages of long prompts.
POOL_THREADS = 4


class Server(uvicorn.Server):
    """Signals set a flag and the process exits with 0: uvicorn's own handlers would end it by the signal."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._on_ready = on_ready
        self._stopper: asyncio.TimerHandle | None = None
        self._asked = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        begin_pool(asyncio.get_running_loop())
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
        except (ValueError, RuntimeError):  # not the main thread: the caller uses `ask_to_exit`
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


def bounds_of(settings: Settings) -> Bounds:
    most = settings.max_connections or most_connections()
    return Bounds(most, settings.head_timeout_s, settings.read_timeout_s)


def make_server(app: FastAPI, on_ready: Callable[[], None]) -> Server:
    gateway: Gateway = app.state.gateway
    config = uvicorn.Config(
        with_cors(app, gateway.settings.cors_origins),
        http=partial(
            StreamingProtocol,
            idle=Idle(),
            bounds=bounds_of(gateway.settings),
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


def begin_pool(loop: asyncio.AbstractEventLoop) -> None:
    """Give the loop its pool of threads and start them all: one that began only when it was needed would look like a
    thread that is leaked."""
    pool, everyone = ThreadPoolExecutor(POOL_THREADS, "pool"), threading.Barrier(POOL_THREADS)
    for _ in range(POOL_THREADS):
        pool.submit(everyone.wait)
    loop.set_default_executor(pool)
