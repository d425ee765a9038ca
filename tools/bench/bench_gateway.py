"""Chunks per second and CPU per chunk of the gateway's hot path, over an engine that does nothing but count.

Usage: bench_gateway.py [--tokens 2000] [--streams 1 16 64] [--runs 5] [--step-ms 0] [--grpc]

The gateway is a process of its own (uvicorn, uvloop, the real application); this process only counts bytes. The engine
makes one token per stream and step, as fast as it can or once per `--step-ms`. It lives in the gateway's process
(its cost is in the figure), or with `--grpc` behind a real gRPC server in a third process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import uvloop
from fastapi import FastAPI

from sluice_gateway.app import create_app
from sluice_gateway.http.serve import listen, make_server, url_of
from sluice_gateway.memory import MemoryClient, MemoryEngine, MemoryFleet
from sluice_gateway.routing.fleet import Fleet, Member
from sluice_gateway.settings import Settings
from sluice_gateway.text.tokenizer import ByteTokenizer
from sluice_launch.commands import Command
from sluice_launch.process import Process
from sluice_protocol import codec
from sluice_protocol.generate import Role
from sluice_protocol.v1.engine_pb2_grpc import EngineServicer, add_EngineServicer_to_server

TEXT = b"The quick brown fox jumps over the lazy dog. "


def make_engine(step_s: float) -> MemoryEngine:
    def next_token(_prompt: object, position: int) -> int:
        return TEXT[position % len(TEXT)]

    return MemoryEngine(Role.UNIFIED, next_token, max_running=256, max_context_tokens=1 << 20, step_s=step_s)


def serve_gateway(step_s: float) -> None:
    """Print {"url", "pid"} and serve over an engine in memory until SIGTERM."""
    engines: dict[str, MemoryEngine] = {}
    settings = Settings("m", "bench", Fleet((Member(Role.UNIFIED, "u"),)), shutdown_s=1.0)
    app = create_app(settings, ByteTokenizer(), MemoryFleet(engines).factory)
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engines["u"] = make_engine(step_s)
        steps = asyncio.create_task(engines["u"].run())
        async with inner(app):
            yield
        steps.cancel()

    app.router.lifespan_context = lifespan
    sock = listen("127.0.0.1:0")
    line = json.dumps({"url": url_of(sock), "pid": os.getpid()})
    make_server(app, lambda: print(line, flush=True)).run(sockets=[sock])


class Wire(EngineServicer):
    def __init__(self, engine: MemoryEngine) -> None:
        self._engine = engine
        self._client = MemoryClient(engine)

    async def Hello(self, request: Any, context: Any) -> Any:
        return codec.encode_engine_hello(self._engine.hello)

    async def Load(self, request: Any, context: Any) -> Any:
        return codec.encode_load(self._engine.load)

    async def Attach(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for batch in self._client.attach(request.gateway_id):
            yield codec.encode_token_batch(batch)

    async def Generate(self, request: Any, context: Any) -> Any:
        call = self._client.generate(codec.decode_generate_request(request))
        try:
            reply = await call.reply()
            assert reply is not None
            return codec.encode_generate_reply(reply)
        finally:
            call.cancel()


async def serve_engine(step_s: float) -> None:
    """Print {"address"} and serve gRPC until killed."""
    engine, server = make_engine(step_s), grpc.aio.server()
    add_EngineServicer_to_server(Wire(engine), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"address": f"127.0.0.1:{port}"}), flush=True)
    await engine.run()


async def one_stream(port: int, tokens: int, firsts: list[float]) -> int:
    """Number of content chunks of one streamed answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    fields = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "stream": True}
    body = json.dumps(fields).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    started = time.perf_counter()
    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    parts: list[bytes] = []
    while data := await reader.read(1 << 16):
        if not parts:
            firsts.append(time.perf_counter() - started)
        parts.append(data)
    writer.close()
    text = b"".join(parts)
    return text.count(b'"content":"') - text.count(b'"content":""')


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(port: int, pid: int, streams: int, tokens: int) -> tuple[float, float, float]:
    """(chunks/s, CPU microseconds of the gateway per chunk, median seconds to the first byte)."""
    firsts: list[float] = []
    cpu, wall = cpu_seconds(pid), time.perf_counter()
    counts = await asyncio.gather(*(one_stream(port, tokens, firsts) for _ in range(streams)))
    wall, cpu = time.perf_counter() - wall, cpu_seconds(pid) - cpu
    total = sum(counts)
    if total != streams * tokens:
        raise SystemExit(f"{total} chunks came, not {streams * tokens}")
    return total / wall, 1e6 * cpu / total, statistics.median(firsts)


def launch(stack: ExitStack, command: list[str]) -> Any:
    """The first line that the process prints, as JSON; the process ends with `stack`."""
    process = Process(Command("bench", tuple(command)))
    stack.callback(process.end, 20)
    return process.wait_event(lambda event: True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--step-ms", type=float, default=0.0, help="pause before each step; 0: as fast as it goes")
    parser.add_argument("--grpc", action="store_true", help="the engine is a process of its own behind gRPC")
    parser.add_argument("--serve", choices=["gateway", "engine"], help=argparse.SUPPRESS)
    return parser.parse_args()


def report(arguments: argparse.Namespace, port: int, pid: int) -> None:
    run: Callable[..., tuple[float, float, float]] = lambda *a: uvloop.run(measure(*a))  # noqa: E731
    run(port, pid, 4, 100)
    for streams in arguments.streams:
        results = [run(port, pid, streams, arguments.tokens) for _ in range(arguments.runs)]
        rate, cpu, first = (statistics.median(column) for column in zip(*results))
        figures = f"{rate:.0f} chunks/s, {cpu:.1f} us CPU/chunk, first {first * 1e3:.1f} ms"
        print(f"streams={streams} {figures} (median of {arguments.runs})")


def main() -> int:
    arguments = parse_arguments()
    step_s = arguments.step_ms / 1000
    if arguments.serve == "gateway":
        serve_gateway(step_s)
    elif arguments.serve == "engine":
        uvloop.run(serve_engine(step_s))
    else:
        with ExitStack() as stack:
            if arguments.grpc:
                engine = launch(stack, [__file__, "--serve", "engine", f"--step-ms={arguments.step_ms}"])
                command = ["-m", "sluice_gateway", "--model-name", "m", "--tokenizer", "bytes", "--shutdown-s", "1"]
                ready = launch(stack, [*command, "--unified", engine["address"]])
            else:
                ready = launch(stack, [__file__, "--serve", "gateway", f"--step-ms={arguments.step_ms}"])
            time.sleep(1.0)
            report(arguments, int(ready["url"].rsplit(":", 1)[1]), ready["pid"])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
