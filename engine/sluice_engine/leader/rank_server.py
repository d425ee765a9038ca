"""The leader's end of the ranks' Unix socket: frames out, messages in. Asyncio protocol, no thread.

A connection is a rank once it has said a valid RankHello, and from then on its loss or a bad frame ends the engine.
Until then it is a stranger: closed when it says anything else.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

from sluice_engine import wire
from sluice_engine.errors import RankFault
from sluice_engine.rank.rank import RankFailed, RankHello, RankMessage, RankReady, StepExecuted, decode_rank_message
from sluice_engine.step import StepResult

MAX_HELLO_BYTES = 1024


class _Stranger(Exception):
    """It is no rank that is waited for."""


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
                message = decode_rank_message(frame)
                if self.rank < 0:
                    self._server.register(self, message)
                else:
                    self._server.on_message(self, message)
            if self.rank < 0 and len(self._buffer) > MAX_HELLO_BYTES:
                raise _Stranger("its first frame has no end")
        except Exception as error:
            if self.rank >= 0:
                self._server.on_death(RankFault(self.rank, "BadFrame", str(error)))
                return
            assert self._transport is not None
            self._buffer.clear()
            self._transport.abort()
            self._server.refuse(str(error))

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
        self.refused = 0
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

    def register(self, connection: _Connection, message: RankMessage) -> None:
        """Raises _Stranger."""
        if not isinstance(message, RankHello):
            raise _Stranger(f"{type(message).__name__} before RankHello")
        if not 0 <= message.rank < self._count:
            raise _Stranger(f"rank {message.rank} of {self._count}")
        if message.rank in self.pids:
            raise _Stranger(f"rank {message.rank} is taken by process {self.pids[message.rank]}")
        connection.rank, self.pids[message.rank] = message.rank, message.pid
        self.links.append(connection)

    def refuse(self, why: str) -> None:
        self.refused += 1
        print(f"ranks' socket: closed a connection that is no rank's ({self.refused} so far): {why}", file=sys.stderr)

    def on_message(self, connection: _Connection, message: RankMessage) -> None:
        """From a registered rank. Raises ValueError when it speaks as another."""
        said_by = message.result.rank if isinstance(message, StepExecuted) else message.rank
        if said_by != connection.rank:
            raise ValueError(f"{type(message).__name__} of rank {said_by}")
        match message:
            case StepExecuted(result):
                self._on_result(result)
            case RankHello():
                raise ValueError("RankHello a second time")
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
