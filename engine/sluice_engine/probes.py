"""Probe endpoints of the supervisor: plain HTTP/1.1 over asyncio, a handful of paths, no work enqueued by any."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, dataclass

MAX_REQUEST_BYTES = 8192
READ_S = 2.0


@dataclass(slots=True)
class Readiness:
    """What the supervisor knows; verdicts on progress come with their own issue."""

    role: str
    ready: bool = False
    draining: bool = False
    dead: str = ""


class ProbeServer:
    def __init__(self, readiness: Readiness) -> None:
        self._readiness = readiness
        self._server: asyncio.Server | None = None

    async def start(self, host: str) -> int:
        """The port, picked by the system."""
        self._server = await asyncio.start_server(self._serve, host, 0, limit=MAX_REQUEST_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    def answer(self, path: str) -> tuple[int, dict[str, object]]:
        """(status, body) of one path."""
        now = self._readiness
        body: dict[str, object] = {"verdict": "dead" if now.dead else "alive", **asdict(now)}
        if path in ("/livez", "/health"):
            return (503 if now.dead else 200), body
        if path in ("/readyz", "/startupz"):
            return (200 if now.ready and not now.dead else 503), body
        return 404, {"error": f"no such path; there are /livez /readyz /startupz /health, not {path[:100]}"}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), READ_S)
            parts = head.split(b"\r\n", 1)[0].split(b" ")
            path = parts[1].decode("latin-1").partition("?")[0] if len(parts) == 3 else "?"
            status, body = self.answer(path)
            payload = json.dumps(body).encode()
            reason = {200: "OK", 404: "Not Found", 503: "Service Unavailable"}[status]
            writer.write(
                f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode()
                + payload
            )
            await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass  # a probe that is no HTTP gets no answer
        finally:
            writer.close()
