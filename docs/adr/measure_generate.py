"""What a request costs gRPC itself: a stream of two events against a call with one answer. For ADR 0050.

Usage: measure_generate.py [REQUESTS]
"""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import uvloop

AT_ONCE = 64
PROMPT, ADMITTED, ENDED = b"p" * 600, b"a" * 8, b"e" * 60
LASTS_S = 0.02


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def two_events(_request: bytes, _context: object) -> AsyncIterator[bytes]:
    yield ADMITTED
    await asyncio.sleep(LASTS_S)
    yield ENDED


async def one_answer(_request: bytes, _context: object) -> bytes:
    await asyncio.sleep(LASTS_S)
    return ENDED


async def tell_cpu(_request: bytes, _context: object) -> bytes:
    return str(cpu_s()).encode()


async def serve() -> None:
    """Print the port and serve until killed."""
    server = grpc.aio.server()
    methods = {
        "TwoEvents": grpc.unary_stream_rpc_method_handler(two_events),
        "OneAnswer": grpc.unary_unary_rpc_method_handler(one_answer),
        "Cpu": grpc.unary_unary_rpc_method_handler(tell_cpu),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("measure.M", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


async def ask(port: str, requests: int) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stream, call = channel.unary_stream("/measure.M/TwoEvents"), channel.unary_unary("/measure.M/OneAnswer")
        cpu = channel.unary_unary("/measure.M/Cpu")

        async def streamed() -> None:
            async for _ in stream(PROMPT):
                pass

        async def called() -> None:
            await call(PROMPT)

        for name, one in (("a stream of two events", streamed), ("one answer", called)):

            async def some(one: object = one) -> None:
                for _ in range(requests // AT_ONCE):
                    await one()  # type: ignore[operator]

            await some()  # whatever the first ones cost
            theirs, ours = float(await cpu(b"")), cpu_s()
            await asyncio.gather(*(some() for _ in range(AT_ONCE)))
            theirs, ours = float(await cpu(b"")) - theirs, cpu_s() - ours
            print(f"{name:24s} engine {theirs / requests * 1e6:4.0f} us  gateway {ours / requests * 1e6:4.0f} us")


def main() -> None:
    if sys.argv[1:] == ["serve"]:
        uvloop.run(serve())
        return
    server = subprocess.Popen([sys.executable, __file__, "serve"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        uvloop.run(ask(server.stdout.readline().strip(), int(sys.argv[1]) if len(sys.argv) > 1 else 6400))
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
