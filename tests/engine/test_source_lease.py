"""What a source says on a lease, and in how many messages: each costs both sides as much as a dozen lines of ours."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from tls_stack import FINGERPRINT

from sluice_engine.lease import server
from sluice_engine.lease.at_hand import AtHand
from sluice_protocol.codec import decode_source_messages, encode_reader_message
from sluice_protocol.lease import LeaseEvent
from sluice_protocol.sampling import Sampling
from sluice_protocol.source import Complete, FirstToken, Granted, LeaseAdmitted, Open, SourceHello, WantPrefill

OPEN = Open("lease", "s1", FINGERPRINT, WantPrefill((1, 2, 3), (), Sampling(max_tokens=2)), 0, 3_600_000)
ADMITTED, FIRST, GRANTED, COMPLETE = LeaseAdmitted(77), FirstToken(5, None, 0, 1, False), Granted(()), Complete(0, 0, 3)


class Stream:
    """The handler's end of a gRPC stream, in memory."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[Any] = asyncio.Queue()
        self.written: asyncio.Queue[list[Any]] = asyncio.Queue()

    async def read(self) -> Any:
        return await self.incoming.get()

    async def write(self, message: Any) -> None:
        self.written.put_nowait(list(decode_source_messages(message)))


async def with_lease(use: Callable[[Stream, Any], Any]) -> None:
    """`use` gets the stream, and the lease once the leader was asked; then the reader goes."""
    stream, asked = Stream(), asyncio.get_running_loop().create_future()
    rooms = SimpleNamespace(open_source=lambda opened, lease: asked.set_result(lease), lease_ended=lambda lease: None)
    direct = lambda function, *args: function(*args)  # noqa: E731
    thread = SimpleNamespace(rooms=rooms, counters=Counter(), at_hand=AtHand(), tell_leader=direct, call=direct)
    hello = SourceHello(FINGERPRINT, "s1", (), "stream", "agent", b"", 77)
    lease = server._SourceLease(thread, hello, None, stream)  # type: ignore[arg-type]
    async with asyncio.timeout(20):
        running = asyncio.create_task(lease.run())
        stream.incoming.put_nowait(encode_reader_message(OPEN))
        await use(stream, await asked)
        stream.incoming.put_nowait(grpc.aio.EOF)
        await running


async def settle() -> None:
    """Turns enough for whatever is ready to happen."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_an_admission_travels_with_what_the_first_step_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ADMITTED_ALONE_S", 3600.0)

    async def use(stream: Stream, lease: Any) -> None:
        lease.post(LeaseEvent.ADMITTED, ADMITTED)
        await settle()
        assert stream.written.empty()
        lease.post(LeaseEvent.FIRST_TOKEN, FIRST)
        lease.post(LeaseEvent.GRANTED, GRANTED)
        lease.post(LeaseEvent.COMPLETE, COMPLETE)
        assert await stream.written.get() == [ADMITTED, FIRST, GRANTED, COMPLETE]
        await settle()
        assert stream.written.empty()

    await with_lease(use)


async def test_an_admission_goes_alone_where_the_first_step_takes_long() -> None:
    async def use(stream: Stream, lease: Any) -> None:
        lease.post(LeaseEvent.ADMITTED, ADMITTED)
        assert await stream.written.get() == [ADMITTED]
        lease.post(LeaseEvent.FIRST_TOKEN, FIRST)
        assert await stream.written.get() == [FIRST]

    await with_lease(use)
