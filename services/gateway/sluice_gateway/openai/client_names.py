"""What a client calls its request: bounded before it goes into logs, traces and messages to engines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

MAX_NAME = 128
_HEADERS = ("x-client-request-id", "x-request-id")
_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ClientNames:
    """`trace_parent` is W3C's; "" where the client has none, or sent something else. `request_id` is printable ASCII of
    at most MAX_NAME characters."""

    request_id: str = ""
    trace_parent: str = ""

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> ClientNames:
        given = next((headers[name] for name in _HEADERS if headers.get(name)), "")
        shown = "".join(char if " " <= char <= "~" else "?" for char in given[:MAX_NAME])
        parent = headers.get("traceparent", "")
        return cls(shown, parent if _TRACE_PARENT.fullmatch(parent) else "")


NAMELESS = ClientNames()
