"""Reading a request's body within bounds; its JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from sluice_gateway.http.respond import ClientGone
from sluice_gateway.openai.errors import (
    ApiError,
    body_too_large,
    invalid,
    quoted,
    too_many_body_bytes,
    unsupported_media,
)

DRAIN_FACTOR = 4
"""An oversized body is read and dropped up to so many limits, so that the client gets to read the answer."""
SMALL_BYTES = 256 * 1024
"""A body counts with its first bytes among the small ones, so that large ones leave these their place."""
SMALL_SHARE = 4
"""Small bodies together may have one such part of what large ones may."""
STALLED_S, LEAST_RATE = 2.0, 1024.0
"""A body that has not grown for so long, or that after so long has come at fewer bytes a second, gives its place to one
that needs it."""
MERGED_BYTES = 64 * 1024
"""Smaller parts are put together: a body that comes byte by byte must not cost an object per byte."""
LARGE_BYTES = 256 * 1024
"""From here on a body is read by the prompt worker."""
LARGE_NESTING = 8192
"""So is one with so many brackets: orjson holds the GIL for 35 ms while it makes 80,000 small lists."""


class BodyBudget:
    """Bounds what all bodies have together, in bytes, from their arrival until they are tokenised."""

    def __init__(self, large_bytes: int, clock: Callable[[], float] = monotonic) -> None:
        self.limit = large_bytes
        self._most = (large_bytes // SMALL_SHARE, large_bytes)
        self._held = [0, 0]
        self._clock = clock
        # Bodies that still grow: when they began, and when they last grew.
        self._coming: dict[Body, tuple[float, float]] = {}

    @property
    def held(self) -> int:
        return sum(self._held)

    def change(self, before: int, after: int) -> bool:
        """A body grew or went away. False, and nothing counted: there is no room for that much."""
        changes = [new - old for old, new in zip(_split(before), _split(after))]
        if any(change > 0 and had + change > most for had, change, most in zip(self._held, changes, self._most)):
            return False
        self._held = [had + change for had, change in zip(self._held, changes)]
        return True

    def grow(self, body: Body, size: int) -> bool:
        """`body` has `size` bytes from now on. Bodies that have stalled make room. False: there is none."""
        now = self._clock()
        while not self.change(body.size, size):
            stalled = next(
                (other for other in self._coming if other is not body and self._has_stalled(other, now)), None
            )
            if stalled is None:
                return False
            stalled.lose()
        self._coming[body] = self._coming.get(body, (now, now))[0], now
        return True

    def _has_stalled(self, body: Body, now: float) -> bool:
        began, grew = self._coming[body]
        return now - grew >= STALLED_S or (now - began >= STALLED_S and body.size < LEAST_RATE * (now - began))

    def settle(self, body: Body) -> None:
        """It grows no more."""
        self._coming.pop(body, None)


def _split(size: int) -> tuple[int, int]:
    return min(size, SMALL_BYTES), max(0, size - SMALL_BYTES)


class Body:
    """Counts in `budget` until `release`."""

    def __init__(self, budget: BodyBudget) -> None:
        self.budget = budget
        self.parts: list[bytes | bytearray] = []
        self.size = 0
        self._is_lost = False

    def add(self, part: bytes) -> bool:
        """False: there is no room for it, or its place was given to another one while it stalled; the body is gone."""
        if self._is_lost or not self.budget.grow(self, self.size + len(part)):
            self.release()
            return False
        last = self.parts[-1] if self.parts else b""
        if isinstance(last, bytearray) and len(last) + len(part) <= MERGED_BYTES:
            last += part
        else:
            self.parts.append(bytearray(part) if len(part) < MERGED_BYTES else part)
        self.size += len(part)
        return True

    def lose(self) -> None:
        """Its place is given away."""
        self.release()
        self._is_lost = True

    def release(self) -> None:
        self.budget.settle(self)
        self.budget.change(self.size, 0)
        self.parts, self.size = [], 0

    @property
    def is_large(self) -> bool:
        return self.size > LARGE_BYTES or sum(map(_brackets, self.parts)) > LARGE_NESTING

    def joined(self) -> bytes:
        return b"".join(self.parts)


def _brackets(data: bytes | bytearray) -> int:
    return data.count(b"[") + data.count(b"{")


async def read_body(
    request: Request, limit: int, timeout_s: float, budget: BodyBudget, on_refusal: Callable[[], None]
) -> Body:
    """What should be JSON. `on_refusal` is called when `budget` has no room for it.

    Raises ApiError (408, 413, 415, 503) or ClientGone."""
    _check_type(request)
    body = Body(budget)
    try:
        async with asyncio.timeout(timeout_s):
            await _read(request, limit, body, on_refusal)
    except BaseException as error:
        body.release()
        if isinstance(error, TimeoutError):
            message = f"The request body did not arrive within {timeout_s:g} s."
            raise ApiError(408, message, code="request_timeout") from error
        if isinstance(error, ClientDisconnect):
            raise ClientGone from error
        raise
    budget.settle(body)
    return body


def parse_json(data: bytes) -> Any:
    """Raises ApiError (400)."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        why = str(error).removeprefix("str is ")  # orjson's words for a body that is no UTF-8
        raise invalid(None, f"The request body is not valid JSON: {why}", "invalid_json") from error


def _check_type(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise unsupported_media(f"Content-Encoding {quoted(encoding)} is not supported; send the body as it is.")
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise unsupported_media(f"Content-Type is {quoted(kind)}; send JSON with Content-Type: application/json.")


async def _read(request: Request, limit: int, body: Body, on_refusal: Callable[[], None]) -> None:
    """What is refused is read and dropped, so that the client gets to read the answer."""
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > DRAIN_FACTOR * limit:
        raise body_too_large(limit)
    size = 0
    has_room = True
    async for part in request.stream():
        size += len(part)
        if size > limit:
            body.release()
            if size > DRAIN_FACTOR * limit:
                break
        elif has_room and not body.add(part):
            has_room = False
            on_refusal()
    if size > limit:
        raise body_too_large(limit)
    if not has_room:
        raise too_many_body_bytes(body.budget.limit)
