"""Closed-loop streaming load against an OpenAI chat endpoint: chunks per second, first token, gaps. Stdlib only.

Usage: stream_load.py URL MODEL STREAMS TOKENS [REQUESTS] [--json]

One connection per request, `STREAMS` at a time. Prints one line, or one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Outcome:
    """Times in seconds; `gaps` between the chunks of one answer."""

    status: int
    chunks: int
    first_s: float
    total_s: float
    gaps: tuple[float, ...]


@dataclass(frozen=True)
class Summary:
    streams: int
    requests: int
    ok: int
    chunks: int
    chunks_per_s: float
    first_token_ms: float
    gap_p99_ms: float
    request_ms: float


async def run_request(host: str, port: int, path: str, model: str, tokens: int, number: int) -> Outcome:
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": f"request {number} " + "word " * 50}],
            "max_tokens": tokens,
            "stream": True,
        }
    ).encode()
    head = (
        f"POST {path}/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(head.encode() + body)
    status = int((await reader.readline()).split()[1])
    times: list[float] = []
    while line := await reader.readline():
        # Parsing every chunk would make this process the bottleneck; a chunk with text is known by its beginning.
        if line.startswith(b'data: {"') and b'"content":"' in line and b'"content":""' not in line:
            times.append(time.perf_counter())
    writer.close()
    ended = time.perf_counter()
    gaps = tuple(later - earlier for earlier, later in itertools.pairwise(times))
    return Outcome(status, len(times), (times[0] if times else ended) - started, ended - started, gaps)


async def run_load(url: str, model: str, streams: int, tokens: int, requests: int) -> Summary:
    parts = urlsplit(url)
    numbers = iter(range(requests))
    outcomes: list[Outcome] = []

    async def worker() -> None:
        for number in numbers:
            assert parts.hostname is not None
            outcomes.append(await run_request(parts.hostname, parts.port or 80, parts.path, model, tokens, number))

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(streams)))
    elapsed = time.perf_counter() - started
    gaps = sorted(gap for outcome in outcomes for gap in outcome.gaps)
    chunks = sum(outcome.chunks for outcome in outcomes)
    return Summary(
        streams,
        requests,
        sum(outcome.status == 200 for outcome in outcomes),
        chunks,
        chunks / elapsed,
        statistics.median(outcome.first_s for outcome in outcomes) * 1e3,
        gaps[int(len(gaps) * 0.99)] * 1e3 if gaps else 0.0,
        statistics.median(outcome.total_s for outcome in outcomes) * 1e3,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("streams", type=int)
    parser.add_argument("tokens", type=int)
    parser.add_argument("requests", type=int, nargs="?", default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    requests = args.requests or args.streams * 8
    told = asyncio.run(run_load(args.url, args.model, args.streams, args.tokens, requests))
    if args.json:
        print(json.dumps(asdict(told)))
    else:
        print(
            f"streams={told.streams} ok={told.ok}/{told.requests} chunks={told.chunks} {told.chunks_per_s:.0f} chunks/s"
            f"  first token median {told.first_token_ms:.1f} ms  gap p99 {told.gap_p99_ms:.2f} ms"
            f"  request median {told.request_ms:.0f} ms"
        )


if __name__ == "__main__":
    main()
