"""The operator's own probes and figures, over plain HTTP: what it knows of itself anyway, no question to anybody."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sluice_operator.decide import metrics

REQUEST_S = 5.0


@dataclass(frozen=True, slots=True)
class Answer:
    """`problem`: empty while all is well. `waits_for`: what it needs before it can lead or stand by; empty then."""

    problem: str
    facts: Mapping[str, Any]
    waits_for: str = ""


class Probes:
    """`/livez` is 503 while there is a problem, `/readyz` also while it could not take over; `/status` tells the facts,
    `/metrics` those that are numbers.

    Port 0: the system picks one."""

    def __init__(self, ask: Callable[[], Answer]) -> None:
        self._ask = ask
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """The port. Raises OSError."""
        self._server = await asyncio.start_server(self._serve, host, port)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_S):
                line = await reader.readline()
                while (await reader.readline()).strip():
                    pass
                writer.write(self._answer(line.split()[1].decode() if len(line.split()) > 1 else ""))
                await writer.drain()
        except (OSError, TimeoutError, ValueError):
            pass  # whoever asked has gone, or asks nothing that we know
        finally:
            writer.close()

    def _answer(self, path: str) -> bytes:
        told = self._ask()
        if path == "/livez":
            return _response(503, told.problem + "\n") if told.problem else _response(200, "ok\n")
        if path == "/readyz":
            lacking = told.problem or told.waits_for
            return _response(503, lacking + "\n") if lacking else _response(200, "ok\n")
        if path == "/status":
            return _response(200, json.dumps(told.facts) + "\n")
        if path == "/metrics":
            return _response(200, metrics.exposition(told.facts).decode(), "text/plain; version=0.0.4; charset=utf-8")
        return _response(404, "/livez, /readyz, /status, /metrics\n")


def _response(code: int, text: str, content: str = "text/plain") -> bytes:
    reason = {200: "OK", 404: "Not Found", 503: "Service Unavailable"}[code]
    body = text.encode()
    head = f"HTTP/1.1 {code} {reason}\r\nContent-Type: {content}\r\nContent-Length: {len(body)}\r\nConnection: close"
    return f"{head}\r\n\r\n".encode() + body
