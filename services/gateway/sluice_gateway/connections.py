"""Who is connected. There are as many descriptors as the system gives; a connection that asks nothing gives way."""

from __future__ import annotations

import json
import resource
from typing import Generic, TypeVar

T = TypeVar("T")
# For engines, files, and what libraries open.
RESERVED_DESCRIPTORS = 256
LEAST, MOST = 32, 65_536

_BODY = json.dumps(
    {
        "error": {
            "message": "This gateway has as many requests in work as it may have connections: try again, or raise its"
            " limit of open files (ulimit -n).",
            "type": "server_error",
            "param": None,
            "code": "too_many_connections",
        }
    }
).encode()
TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)


def most_connections() -> int:
    """So many that no descriptor is ever wanting: out of them, libuv accepts whoever comes and hangs up at once, which
    nobody sees."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST
    return min(MOST, max(LEAST, soft - RESERVED_DESCRIPTORS))


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
