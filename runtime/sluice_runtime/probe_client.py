"""Asking a supervisor over HTTP, from a process with an event loop. Bounded in time and bytes; no redirects, no TLS."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
from typing import Any
from urllib.parse import urlsplit

MAX_ANSWER_BYTES = 4 << 20


class NoAnswer(Exception):
    """It could not be reached, did not answer in time, or what it said was no HTTP; the message says which."""


class AskerFailed(NoAnswer):
    """It was not asked at all: we have no descriptor, memory or port left for it. That says nothing of it."""


# What the system says to a process that has too much open.
_OUR_OWN = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL, errno.EAGAIN})


def is_our_own(error: OSError) -> bool:
    """Whether it is the asker's trouble."""
    return error.errno in _OUR_OWN


async def ask(url: str, path: str, timeout_s: float) -> tuple[int, bytes]:
    """(status, body) of `GET path` from `http://HOST:PORT`. Raises NoAnswer, of which AskerFailed is one."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise NoAnswer(f"{url!r} is no address: {error}") from error
    if parts.scheme != "http" or host is None or port is None:
        raise NoAnswer(f"{url!r} is no http://HOST:PORT")
    try:
        async with asyncio.timeout(timeout_s):
            return await _exchange(host, port, path)
    except TimeoutError as error:
        raise NoAnswer(f"no answer from {url} within {timeout_s:g} s") from error
    except OSError as error:
        raise (AskerFailed if is_our_own(error) else NoAnswer)(f"{url}: {error.strerror or error}") from error
    except (ValueError, EOFError, asyncio.LimitOverrunError) as error:
        raise NoAnswer(f"{url} does not speak HTTP: {error}") from error


async def ask_json(url: str, path: str, timeout_s: float) -> Any:
    """The body of a 200 as JSON. Raises NoAnswer for everything else."""
    status, body = await ask(url, path, timeout_s)
    if status != 200:
        raise NoAnswer(f"{url}{path} answered {status}")
    try:
        return json.loads(body)
    except ValueError as error:
        raise NoAnswer(f"{url}{path}: not JSON") from error


async def _exchange(host: str, port: int, path: str) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        request = f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nAccept: application/json\r\nConnection: close\r\n\r\n"
        writer.write(request.encode("latin-1"))
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        return int(head[0].split(" ")[1]), await _body(reader, head[1:])
    except IndexError as error:
        raise ValueError("no status line") from error
    finally:
        writer.transport.abort()  # nothing more is wanted of it, and nothing of it may linger
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _body(reader: asyncio.StreamReader, headers: list[str]) -> bytes:
    """By its length, which every answer of ours has."""
    told = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in headers)}
    length = int(told.get("content-length", "0"))
    if length > MAX_ANSWER_BYTES:
        raise ValueError(f"an answer of {length} bytes, of at most {MAX_ANSWER_BYTES}")
    return await reader.readexactly(length)
