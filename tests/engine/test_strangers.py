"""Connections to a gRPC server of ours that never say who they are: each costs a descriptor, and has its time."""

from __future__ import annotations

import asyncio

import pytest

from sluice_runtime.rpc import keyed_server
from sluice_runtime.rpc.keyed_server import build_server
from sluice_runtime.rpc.options import SERVER

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.mark.parametrize("words", [b"", PREFACE], ids=["nothing", "a preface"])
async def test_a_stranger_is_hung_up_on(monkeypatch: pytest.MonkeyPatch, words: bytes) -> None:
    ((option, ms),) = SERVER
    assert ms <= 10_000
    monkeypatch.setattr(keyed_server, "SERVER", ((option, 500),))
    server = build_server("key")
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(words)
        async with asyncio.timeout(10):
            while await reader.read(4096):
                pass
        writer.close()
    finally:
        await server.stop(None)
