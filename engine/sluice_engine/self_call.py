"""A gRPC call of a process to itself, again and again: gRPC's own threads carry every call of a process, and where one
of them hangs, all loops of ours go on turning and nobody is answered."""

from __future__ import annotations

import asyncio
import os
from uuid import uuid4

import grpc
import grpc.aio

from sluice_engine.health.layout import Phase
from sluice_engine.health.recorder import Row

EVERY_S = 0.5
SERVICE, METHOD = "sluice.Self", "Answer"


async def call_itself(row: Row, every_s: float = EVERY_S) -> None:
    """For ever, until cancelled. `row`: one call is pending while it is not answered, and its progress counts answers,
    errors among them, for these too were brought. Over a socket of its own that has no file: what callers of the
    other ones have to show (key, certificate) is not this one's affair, and it says nothing.

    Raises RuntimeError where there can be no such socket.
    """
    address = f"unix-abstract:sluice-{os.getpid()}-{uuid4().hex}"
    server = grpc.aio.server()
    answer = grpc.unary_unary_rpc_method_handler(_answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: answer}),))
    server.add_insecure_port(address)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
            ask = channel.unary_unary(f"/{SERVICE}/{METHOD}", bytes, bytes)
            row.begin(Phase.IDLE)
            row.doing("a call of this process to itself, over gRPC")
            answers = 0
            while True:
                row.enter(Phase.WAITING)
                row.pending(1)
                try:
                    await ask(b"")
                except grpc.aio.AioRpcError:
                    pass
                answers += 1
                row.progress(answers)
                row.pending(0)
                row.enter(Phase.IDLE)
                await asyncio.sleep(every_s)
    finally:
        row.end()
        await server.stop(None)


async def _answer(request: bytes, context: object) -> bytes:
    return b""
