"""The leader's end of the ranks' Unix socket: frames out, messages in. Asyncio protocol, no thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import cast

from sluice_engine import wire
from sluice_engine.errors import RankFault
from sluice_engine.rank import RankFailed, RankHello, RankMessage, RankReady, StepExecuted, decode_rank_message
from sluice_engine.step import StepResult


class _Connection(asyncio.Protocol):
    """One rank. `rank` is -1 until it has said Hello."""

    def __init__(self, server: RankServer) -> None:
        self._server = server
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self.rank = -1

    def send(self, frame: bytes) -> None:
        assert self._transport is not None
        self._transport.write(wire.pack(frame))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by shape only

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            for frame in wire.split(self._buffer):
                self._server.on_message(self, decode_rank_message(frame))
        except Exception as error:
            self._server.on_death(RankFault(self.rank, "BadFrame", str(error)))

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.on_lost(self)


class RankServer:
    """Waits for `count` ranks. `on_result` gets every step's result, `on_death` the first thing that goes wrong."""

    def __init__(
        self,
        count: int,
        on_result: Callable[[StepResult], None],
        on_death: Callable[[Exception], None],
        on_progress: Callable[[RankMessage], None],
    ) -> None:
        self.links: list[_Connection] = []
        self.pids: dict[int, int] = {}
        self.on_death = on_death
        self._count = count
        self._on_result = on_result
        self._on_progress = on_progress
        self._ready: set[int] = set()
        self._all_ready = asyncio.get_running_loop().create_future()
        self._server: asyncio.Server | None = None
        self._closing = False

    async def start(self, path: str) -> None:
        Path(path).unlink(missing_ok=True)
        self._server = await asyncio.get_running_loop().create_unix_server(lambda: _Connection(self), path)

    async def wait_ready(self) -> None:
        """Until every rank has loaded. Loading takes as long as it takes; a rank that dies is `on_death`."""
        await self._all_ready

    def close(self) -> None:
        self._closing = True
        if self._server is not None:
            self._server.close()

    def on_message(self, connection: _Connection, message: RankMessage) -> None:
        match message:
            case StepExecuted(result):
                self._on_result(result)
            case RankHello(rank, pid):
                connection.rank, self.pids[rank] = rank, pid
                self.links.append(connection)
            case RankReady(rank):
                self._ready.add(rank)
                if len(self._ready) == self._count and not self._all_ready.done():
                    self.links.sort(key=lambda link: link.rank)
                    self._all_ready.set_result(None)
            case RankFailed(rank, reason, detail):
                self.on_death(RankFault(rank, reason, detail))
            case _:
                self._on_progress(message)

    def on_lost(self, connection: _Connection) -> None:
        if not self._closing and connection.rank >= 0:
            self.on_death(RankFault(connection.rank, "RankDead", "its connection ended"))
