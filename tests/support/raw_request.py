"""A gateway over one engine in memory, and requests to it as bytes on a connection."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from sluice_gateway.memory import MemoryEngine
from sluice_protocol.generate import Role


def unified(**fields: Any) -> dict[str, MemoryEngine]:
    return {"u": MemoryEngine(Role.UNIFIED, lambda _prompt, position: 97 + position % 26, **fields)}


async def open_request(
    stack: Any, limit: int = 1 << 26, **fields: Any
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A raw connection with one request on it."""
    port = int(stack.url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=limit)
    body = json.dumps({"model": "m", "prompt": "x", "max_tokens": 50} | fields).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    return reader, writer


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()
