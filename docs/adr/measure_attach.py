"""What a gRPC stream message costs: tokens of 64 streams in one message a step, against one message a token.

Server and client in two processes over loopback, each with one core if there are two. ADR 0007 has the figures.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import uvloop

from sluice_protocol.codec import encode_token_batch
from sluice_protocol.generate import TokenBatch
from sluice_protocol.v1 import engine_pb2, engine_pb2_grpc

STREAMS, STEPS, ROUNDS = 64, 2000, 3


def batches(per_token: bool) -> list[TokenBatch]:
    """Of one step."""
    if per_token:
        return [TokenBatch(0, (stream,), (1,), (7,), ()) for stream in range(STREAMS)]
    return [TokenBatch(0, tuple(range(STREAMS)), (1,) * STREAMS, (7,) * STREAMS, ())]


class Service(engine_pb2_grpc.EngineServicer):
    async def Attach(self, request: Any, context: Any) -> AsyncIterator[engine_pb2.TokenBatch]:
        told, began = batches(request.gateway_id == "token"), time.process_time()
        for _ in range(STEPS):
            for batch in told:
                yield encode_token_batch(batch)
        print((time.process_time() - began) * 1e6 / STREAMS / STEPS, flush=True)


async def serve() -> None:
    server = grpc.aio.server()
    engine_pb2_grpc.add_EngineServicer_to_server(Service(), server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination(300)


async def ask(port: int, how: str) -> tuple[float, float]:
    """(tokens per second, microseconds of our CPU per token)."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        wall, cpu, tokens = time.perf_counter(), time.process_time(), 0
        async for batch in engine_pb2_grpc.EngineStub(channel).Attach(engine_pb2.AttachRequest(gateway_id=how)):
            tokens += len(batch.tokens)
        return tokens / (time.perf_counter() - wall), (time.process_time() - cpu) * 1e6 / tokens


async def main(port: int, server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    for how in ("step", "token") * ROUNDS:
        rate, ours = await ask(port, how)
        theirs = float(server.stdout.readline())
        told = f"CPU per token: engine {theirs:.2f} us, gateway {ours:.2f} us"
        print(f"a message per {how:5}: {rate:9,.0f} tokens/s, {told}")


def start() -> None:
    with subprocess.Popen([sys.executable, __file__, "serve"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            uvloop.run(main(int(server.stdout.readline()), server))
        finally:
            server.kill()


if __name__ == "__main__":
    uvloop.run(serve()) if sys.argv[1:] else start()
