"""Reading a request's body within bounds; its JSON."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from sluice_gateway.errors import ApiError, body_too_large, invalid, unsupported_media
from sluice_gateway.respond import ClientGone

DRAIN_FACTOR = 4
"""An oversized body is read and dropped up to so many limits, so that the client gets to read the answer."""


async def read_body(request: Request, limit: int, timeout_s: float) -> bytes:
    """What should be JSON. Raises ApiError (408, 413, 415) or ClientGone."""
    _check_type(request)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(request, limit)
    except TimeoutError as error:
        message = f"The request body did not arrive within {timeout_s:g} s."
        raise ApiError(408, message, code="request_timeout") from error
    except ClientDisconnect as error:
        raise ClientGone from error


def parse_json(data: bytes) -> Any:
    """Raises ApiError (400)."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise invalid(None, f"The request body is not valid JSON: {error}", "invalid_json") from error


def _check_type(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise unsupported_media(f"Content-Encoding {encoding[:64]!r} is not supported; send the body as it is.")
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise unsupported_media(f"Content-Type is {kind[:64]!r}; send JSON with Content-Type: application/json.")


async def _read(request: Request, limit: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > DRAIN_FACTOR * limit:
        raise body_too_large(limit)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= limit:
            parts.append(part)
            continue
        parts.clear()
        if size > DRAIN_FACTOR * limit:
            break
    if size > limit:
        raise body_too_large(limit)
    return b"".join(parts)
