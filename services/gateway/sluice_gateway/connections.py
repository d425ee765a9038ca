"""Who is connected. There are as many descriptors as the system gives; a connection that asks nothing gives way."""

from __future__ import annotations

import json
import resource
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
# For engines, files, and what libraries open.
RESERVED_DESCRIPTORS = 256
LEAST, MOST = 32, 65_536

# Of request line and headers. The parser has no bound of its own.
MAX_HEAD_BYTES = 64 * 1024


def _answer(status: str, message: str, code: str, *headers: str) -> bytes:
    """One for a connection that ends with it, before there is any request."""
    kind = "server_error" if status.startswith("5") else "invalid_request_error"
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})
    told = ("content-type: application/json", f"content-length: {len(body)}", "connection: close", *headers)
    return "\r\n".join((f"HTTP/1.1 {status}", *told, "", body)).encode()


TOO_MANY = _answer(
    "503 Service Unavailable",
    "This gateway has as many requests in work as it may have connections: try again, or raise its limit of open files"
    " (ulimit -n).",
    "too_many_connections",
    "retry-after: 1",
)
HEAD_TOO_LARGE = _answer(
    "431 Request Header Fields Too Large",
    f"Request line and headers are longer than {MAX_HEAD_BYTES} bytes: leave some out.",
    "headers_too_large",
)


def most_connections() -> int:
    """So many that no descriptor is ever wanting: out of them, libuv accepts whoever comes and hangs up at once, which
    nobody sees."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST
    return min(MOST, max(LEAST, soft - RESERVED_DESCRIPTORS))


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of a server's connections. `most`: in all. `head_s`: for saying what is wanted; `read_s`: for reading what was
    written, whole or to where the transport takes more."""

    most: int
    head_s: float
    read_s: float


class Idle(Generic[T]):
    """Connections on which no request is in work, the longest idle first."""

    def __init__(self) -> None:
        self._since: dict[T, None] = {}

    def begin(self, connection: T) -> None:
        self._since.pop(connection, None)
        self._since[connection] = None

    def end(self, connection: T) -> None:
        self._since.pop(connection, None)

    def longest(self, but: T) -> T | None:
        """Not `but`; None where there is no other."""
        return next((connection for connection in self._since if connection is not but), None)
