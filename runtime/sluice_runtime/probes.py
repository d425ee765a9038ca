"""The supervisor's HTTP: probes for the kubelet, a summary for people, and on a port of its own what may hold prompts.

Plain HTTP/1.1 over asyncio. No path enqueues work anywhere: everything is answered from what the supervisor has read.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import sys
import termios
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import SupportsIndex
from urllib.parse import parse_qsl, urlsplit

MAX_REQUEST_BYTES = 8192
# At a time. A prober says all it has to say at once: the connection that was silent longest makes way for the next.
MAX_CONNECTIONS = 128
# So many are accepted in a turn of the loop; the others wait in the kernel's queue, because a client that
# finds that full tries again only after a second.
ACCEPTS, QUEUE = 32, 1024
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
    500: "Internal Server Error",
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


class _Reader(asyncio.StreamReader):
    """Says whether anything has come."""

    has_heard = False

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        self.has_heard = True
        super().feed_data(data)


@dataclass(slots=True, eq=False)
class _Connection:
    """`is_asking` until its request is whole."""

    reader: _Reader
    writer: asyncio.StreamWriter
    is_asking: bool = True

    def is_silent(self) -> bool:
        """Not one byte has come, nor waits in the kernel for our next turn."""
        if self.reader.has_heard:
            return False
        try:
            waiting = fcntl.ioctl(self.writer.get_extra_info("socket").fileno(), termios.FIONREAD, bytes(4))
        except (OSError, ValueError):  # it has gone
            return True
        return int.from_bytes(waiting, sys.byteorder) == 0


class ProbeServer:
    """`routes`: "GET /path" -> what answers it. Routes must not block; those that take time are awaited.

    `only_loopback`: a name that only resolves to loopback is refused, or any page in a browser here could ask."""

    def __init__(self, routes: Mapping[str, Route], *, only_loopback: bool = False) -> None:
        self._routes = dict(routes)
        self._only_loopback = only_loopback
        self._server: asyncio.Server | None = None
        self._serving: dict[asyncio.Task[None], _Connection] = {}  # the oldest first

    async def start(self, host: str, port: int = 0) -> int:
        """The port; 0 lets the system pick one."""
        loop = asyncio.get_running_loop()

        def connection() -> asyncio.StreamReaderProtocol:
            reader = _Reader(MAX_REQUEST_BYTES, loop)
            return asyncio.StreamReaderProtocol(reader, lambda _, writer: self._accept(reader, writer), loop)

        self._server = await loop.create_server(connection, host, port, backlog=ACCEPTS)
        for bound in self._server.sockets:
            with bound.dup() as listening:
                listening.listen(QUEUE)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Connections that are being answered, or are silent, are closed."""
        if self._server is not None:
            self._server.close()
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def _accept(self, reader: _Reader, writer: asyncio.StreamWriter) -> None:
        while len(self._serving) >= MAX_CONNECTIONS:
            self._hang_up(self._idlest())
        connection = _Connection(reader, writer)
        task = asyncio.get_running_loop().create_task(self._serve(connection))
        self._serving[task] = connection
        task.add_done_callback(lambda task: self._serving.pop(task, None))

    def _idlest(self) -> asyncio.Task[None]:
        """The oldest that has said nothing; else the oldest that has not said all; else the oldest."""
        told = self._serving.items()
        asking = (task for task, connection in told if connection.is_asking)
        silent = (task for task, connection in told if connection.is_asking and connection.is_silent())
        return next(silent, None) or next(asking, None) or next(iter(self._serving))

    def _hang_up(self, task: asyncio.Task[None]) -> None:
        """A task that is cancelled before it has begun closes nothing itself."""
        self._serving.pop(task).writer.transport.abort()
        task.cancel()

    async def answer(self, method: str, target: str) -> Answer:
        path, _, query = target.partition("?")
        route = self._routes.get(f"{method} {path}")
        if route is None:
            methods = sorted(key.split()[0] for key in self._routes if key.split()[1] == path)
            if methods:
                return json_answer(405, {"error": f"{path} takes {' or '.join(methods)}, not {method[:20]}"})
            paths = " ".join(sorted({key.split()[1] for key in self._routes}))
            return json_answer(404, {"error": f"no such path; there are {paths}, not {path[:100]}"})
        try:
            told = route(dict(parse_qsl(query)))
            return told if isinstance(told, Answer) else await told
        except Exception as error:  # such as of a recorder that was written over
            traceback.print_exception(error, file=sys.stderr)
            return json_answer(500, {"error": f"{type(error).__name__}: {error}"})

    async def _serve(self, connection: _Connection) -> None:
        """One request, and the connection's end: also of a client that does not read its answer."""
        writer = connection.writer
        try:
            await self._exchange(connection)
        finally:
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _exchange(self, connection: _Connection) -> None:
        writer = connection.writer
        try:
            async with asyncio.timeout(READ_S):
                head = await connection.reader.readuntil(b"\r\n\r\n")
            connection.is_asking = False
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
