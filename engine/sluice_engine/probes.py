"""The supervisor's HTTP: probes for the kubelet, a summary for people, and on a port of its own what may hold prompts.

Plain HTTP/1.1 over asyncio. No path enqueues work anywhere: everything is answered from what the supervisor has read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

MAX_REQUEST_BYTES = 8192
READ_S = 2.0
WRITE_S = 5.0
JSON = "application/json"
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_WORDS = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
}


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes
    content_type: str = JSON


def json_answer(status: int, value: object) -> Answer:
    return Answer(status, json.dumps(value, default=str).encode() + b"\n")


Query = Mapping[str, str]
Route = Callable[[Query], Answer | Awaitable[Answer]]


def is_loopback(head: bytes) -> bool:
    """Whether the request names this machine, and comes from no page of another one."""
    fields = [line.partition(b":") for line in head.split(b"\r\n")[1:]]
    told = {name.strip().lower(): value.strip().decode("latin-1") for name, _, value in fields}
    hosts = [told.get(b"host", "localhost")]
    if b"origin" in told:
        hosts.append(told[b"origin"].partition("//")[2])
    try:
        return all(urlsplit(f"//{host}").hostname in LOOPBACK for host in hosts)
    except ValueError:
        return False


class ProbeServer:
    """`routes`: "GET /path" -> what answers it. Routes must not block; those that take time are awaited.

    `only_loopback`: a name that only resolves to loopback is refused, or any page in a browser here could ask."""

    def __init__(self, routes: Mapping[str, Route], *, only_loopback: bool = False) -> None:
        self._routes = dict(routes)
        self._only_loopback = only_loopback
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int = 0) -> int:
        """The port; 0 lets the system pick one."""
        self._server = await asyncio.start_server(self._accept, host, port, limit=MAX_REQUEST_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Who is being answered, or says nothing, is hung up on."""
        if self._server is not None:
            self._server.close()
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def answer(self, method: str, target: str) -> Answer:
        path, _, query = target.partition("?")
        route = self._routes.get(f"{method} {path}")
        if route is None:
            methods = sorted(key.split()[0] for key in self._routes if key.split()[1] == path)
            if methods:
                return json_answer(405, {"error": f"{path} takes {' or '.join(methods)}, not {method[:20]}"})
            paths = " ".join(sorted({key.split()[1] for key in self._routes}))
            return json_answer(404, {"error": f"no such path; there are {paths}, not {path[:100]}"})
        told = route(dict(parse_qsl(query)))
        return told if isinstance(told, Answer) else await told

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request, and the connection's end: also of a client that does not read its answer."""
        try:
            await self._exchange(reader, writer)
        finally:
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(READ_S):
                head = await reader.readuntil(b"\r\n\r\n")
            parts = head.split(b"\r\n", 1)[0].split(b" ")
            if len(parts) != 3:
                return
            if self._only_loopback and not is_loopback(head):
                answer = json_answer(403, {"error": "this port answers to 127.0.0.1, [::1] and localhost only"})
            else:
                answer = await self.answer(parts[0].decode("latin-1"), parts[1].decode("latin-1"))
            writer.write(
                f"HTTP/1.1 {answer.status} {_WORDS[answer.status]}\r\nContent-Type: {answer.content_type}\r\n"
                f"Content-Length: {len(answer.body)}\r\nConnection: close\r\n\r\n".encode()
                + answer.body
            )
            async with asyncio.timeout(WRITE_S):
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass  # a probe that is no HTTP gets no answer
