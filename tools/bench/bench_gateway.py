"""Chunks per second and CPU per chunk of the gateway's hot path, over in-memory engines.

Usage: bench_gateway.py [--tokens 2000] [--streams 1 16 64] [--runs 5] [--step-ms 0]

The server is a process of its own (uvicorn, uvloop, the real application, one engine in memory that makes one token
per stream and step as fast as it can); this process only counts bytes. The engine's own cost is in the figure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import uvloop
from fastapi import FastAPI

from sluice_gateway.app import create_app
from sluice_gateway.fleet import Fleet, Member
from sluice_gateway.memory import MemoryEngine, MemoryFleet
from sluice_gateway.serve import listen, make_server, url_of
from sluice_gateway.settings import Settings
from sluice_gateway.tokenizer import ByteTokenizer
from sluice_protocol.generate import Role

TEXT = b"The quick brown fox jumps over the lazy dog. "


def serve(step_s: float) -> None:
    """Print {"url", "pid"} and serve until SIGTERM."""
    engines: dict[str, MemoryEngine] = {}
    fleet = MemoryFleet(engines)
    settings = Settings("m", "bench", Fleet((Member(Role.UNIFIED, "u"),)), shutdown_s=1.0)
    app = create_app(settings, ByteTokenizer(), fleet.factory)
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI):  # type: ignore[no-untyped-def]
        engine = MemoryEngine(
            Role.UNIFIED,
            lambda _prompt, position: TEXT[position % len(TEXT)],
            max_running=256,
            max_context_tokens=1 << 20,
            step_s=step_s,
        )
        engines["u"] = engine
        steps = asyncio.create_task(engine.run())
        async with inner(app):
            yield
        steps.cancel()

    app.router.lifespan_context = lifespan
    sock = listen("127.0.0.1:0")
    line = json.dumps({"url": url_of(sock), "pid": os.getpid()})
    make_server(app, lambda: print(line, flush=True)).run(sockets=[sock])


async def one_stream(port: int, tokens: int, gaps: list[float]) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "stream": True}
    ).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    started = time.perf_counter()
    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    parts: list[bytes] = []
    while data := await reader.read(1 << 16):
        if not parts:
            gaps.append(time.perf_counter() - started)
        parts.append(data)
    writer.close()
    text = b"".join(parts)
    return text.count(b'"content":"') - text.count(b'"content":""')


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(port: int, pid: int, streams: int, tokens: int) -> tuple[float, float, float]:
    """(chunks/s, CPU microseconds per chunk, median seconds to the first byte)."""
    firsts: list[float] = []
    cpu, wall = cpu_seconds(pid), time.perf_counter()
    counts = await asyncio.gather(*(one_stream(port, tokens, firsts) for _ in range(streams)))
    wall, cpu = time.perf_counter() - wall, cpu_seconds(pid) - cpu
    total = sum(counts)
    if total != streams * tokens:
        raise SystemExit(f"{total} chunks came, not {streams * tokens}")
    return total / wall, 1e6 * cpu / total, statistics.median(firsts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--step-ms", type=float, default=0.0, help="pause before each step; 0: as fast as it goes")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.step_ms / 1000)
        return 0
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", f"--step-ms={arguments.step_ms}"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        ready = json.loads(server.stdout.readline())
        port = int(ready["url"].rsplit(":", 1)[1])
        time.sleep(0.5)
        for streams in arguments.streams:
            tokens = arguments.tokens if streams > 1 else 4 * arguments.tokens
            runs = [uvloop.run(measure(port, ready["pid"], streams, tokens)) for _ in range(arguments.runs)]
            rate, cpu, first = (statistics.median(column) for column in zip(*runs))
            figures = f"{rate:.0f} chunks/s, {cpu:.1f} us CPU/chunk, first {first * 1e3:.1f} ms"
            print(f"streams={streams} {figures} (median of {arguments.runs})")
    finally:
        server.terminate()
        server.wait(20)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
