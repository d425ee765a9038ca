"""Open connections. There are as many descriptors as the system gives; a connection that asks nothing gives way."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from sluice_gateway.http.framing import response_head
from sluice_gateway.openai.errors import ApiError, headers_too_large, too_many_connections

T = TypeVar("T")
# For engines, files, and what libraries open.
RESERVED_DESCRIPTORS = 256
LEAST, MOST = 32, 65_536

# Of request line and headers. The parser has no bound of its own.
MAX_HEAD_BYTES = 64 * 1024


def answer_before_a_request(error: ApiError) -> bytes:
    """For a connection that ends with it: HTTP/1.1 as it is on the wire."""
    body = error.body()
    headers = [*error.headers(), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
    return response_head(error.status, headers) + body


TOO_MANY = answer_before_a_request(too_many_connections())
HEAD_TOO_LARGE = answer_before_a_request(headers_too_large(MAX_HEAD_BYTES))


def most_connections() -> int:
    """Connection limit; reserves file descriptors for engines and evidence. Without any left, libuv accepts connections
    and closes them at once, which leaves no trace."""
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


class Deadline:
    """Of something that is awaited: `then` is called when `seconds` have passed between `begin` and `end`. Another
    `begin` in between changes nothing."""

    def __init__(self, seconds: float, then: Callable[[], None]) -> None:
        self._seconds, self._then = seconds, then
        self._timer: asyncio.TimerHandle | None = None

    @property
    def runs(self) -> bool:
        return self._timer is not None

    def begin(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._is_over)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_over(self) -> None:
        self._timer = None
        self._then()
