"""A gRPC call of a process to itself, again and again: gRPC's own threads carry every call of a process, and where one
of them hangs, all loops of ours go on turning and no client is answered."""

from __future__ import annotations

import asyncio
import os
from uuid import uuid4

import grpc
import grpc.aio

from sluice_runtime.health.layout import Phase
from sluice_runtime.health.recorder import Row

EVERY_S = 0.5
SERVICE, METHOD = "sluice.Self", "Answer"


class SelfCall:
    """One call is pending in `row` while it is not answered, and its progress counts answers, errors among them, for
    these too were brought. Over a socket of its own that has no file: what callers of the other ones have to show (key,
    certificate) is not this one's affair, and it says nothing."""

    def __init__(self, row: Row, every_s: float = EVERY_S) -> None:
        self._row, self._every_s = row, every_s
        self._server = grpc.aio.server()
        answer = grpc.unary_unary_rpc_method_handler(_answer)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: answer}),))
        self._address = f"unix-abstract:sluice-{os.getpid()}-{uuid4().hex}"
        self._channel = grpc.aio.insecure_channel(self._address, options=(("grpc.enable_http_proxy", 0),))
        self._ask = self._channel.unary_unary(f"/{SERVICE}/{METHOD}", bytes, bytes)

    async def open(self) -> None:
        """Until the first answer: from then on it needs no further descriptor. Raises RuntimeError where there can be
        no such socket, grpc.aio.AioRpcError."""
        self._server.add_insecure_port(self._address)
        await self._server.start()
        await self._ask(b"", wait_for_ready=True)
        self._row.begin(Phase.IDLE)
        self._row.doing("a call of this process to itself, over gRPC")

    async def run(self) -> None:
        """For ever, until cancelled."""
        row, answers = self._row, 0
        try:
            while True:
                row.enter(Phase.WAITING)
                row.pending(1)
                try:
                    await self._ask(b"")
                except grpc.aio.AioRpcError:
                    pass
                answers += 1
                row.progress(answers)
                row.pending(0)
                row.enter(Phase.IDLE)
                await asyncio.sleep(self._every_s)
        finally:
            row.end()
            await self._channel.close(None)
            await self._server.stop(None)


async def _answer(request: bytes, context: object) -> bytes:
    return b""
