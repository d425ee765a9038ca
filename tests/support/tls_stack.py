"""Real gRPC servers and clients of the project over TLS, in one process: an engine's service that tests drive, and a
source and a reader of leases on lease threads of their own."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

from sluice_engine.leader.handoff.ports import SourceStream, Why
from sluice_engine.leader.lease.connections import Connections
from sluice_engine.leader.lease.reader_stream import LeaseClient
from sluice_engine.leader.lease.source_stream import SourceServer
from sluice_engine.leader.lease.thread import LeaseThread
from sluice_engine.leader.server import build_server
from sluice_protocol import codec
from sluice_protocol.fingerprint import Fingerprint
from sluice_protocol.generate import Ended, EndReason, EngineHello, Load, Role, TokenBatch
from sluice_protocol.sampling import Sampling
from sluice_protocol.source import (
    Granted,
    GrantedRecord,
    LeaseAdmitted,
    Open,
    ReaderMessage,
    SourceHello,
    SourceMessage,
    WantPrefill,
)
from sluice_protocol.v1 import engine_pb2 as pb
from sluice_protocol.v1 import engine_pb2_grpc
from sluice_runtime.health.recorder import unrecorded
from sluice_runtime.tls.keeper import IdentityKeeper
from sluice_runtime.tls.server import bind

KEY = "key"
FINGERPRINT = Fingerprint.of({"a": "b"})
LOAD = Load("i1", 1, 2, 8, 10, 20, 1.5)


class DrivenEngine(engine_pb2_grpc.EngineServicer):
    """`batches` go out on Attach; Generate ends when `ended` is set."""

    def __init__(self, role: Role) -> None:
        self.hello = EngineHello(role, FINGERPRINT, "i1", 4096, 16, "", 77, 512)
        self.batches: asyncio.Queue[TokenBatch] = asyncio.Queue()
        self.ended = asyncio.Event()
        self.calls: Counter[str] = Counter()

    async def Hello(self, request: Any, context: Any) -> Any:
        self.calls["Hello"] += 1
        return codec.encode_engine_hello(self.hello)

    async def Load(self, request: Any, context: Any) -> Any:
        self.calls["Load"] += 1
        return codec.encode_load(LOAD)

    async def Attach(self, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            yield pb.TokenBatch()
            while True:
                yield codec.encode_token_batch(await self.batches.get())
        finally:
            self.calls["Attach ended"] += 1

    async def Generate(self, request: Any, context: Any) -> Any:
        await self.ended.wait()
        return codec.encode_generate_reply(Ended(EndReason.STOP, 0))


async def start_engine(role: Role, identity: IdentityKeeper | None) -> tuple[DrivenEngine, str, Any]:
    """(the fake, its address, the server)."""
    engine, server = DrivenEngine(role), build_server(KEY, identity)
    engine_pb2_grpc.add_EngineServicer_to_server(engine, server)
    port = bind(server, "127.0.0.1:0", identity)
    await server.start()
    return engine, f"127.0.0.1:{port}", server


class SourceHeard:
    """`SourceEar`: what a source's leader hears of its leases."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()

    def hear(self, stream: SourceStream, messages: Sequence[ReaderMessage]) -> None:
        for message in messages:
            self.heard.put_nowait(("open" if isinstance(message, Open) else "said", message, stream))
            if isinstance(message, Open):
                stream.send(LeaseAdmitted(77))

    def hear_unknown(self, stream: SourceStream, detail: str) -> None:
        self.heard.put_nowait(("unknown", detail, stream))

    def hear_end(self, stream: SourceStream) -> None:
        self.heard.put_nowait(("ended", stream))


class ReaderHeard:
    """`ReaderEar`: what a reader's leader hears of its leases. An Admitted is not told of."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()

    def hear(self, lease_id: str, messages: Sequence[SourceMessage]) -> None:
        for message in messages:
            if isinstance(message, Granted):
                self.heard.put_nowait(("granted", lease_id, message.records))

    def hear_unknown(self, lease_id: str, detail: str) -> None:
        self.heard.put_nowait(("unknown", lease_id, detail))

    def hear_end(self, lease_id: str, why: Why) -> None:
        self.heard.put_nowait(("failed", lease_id, why.reason, why.detail))


class LeaseEnds:
    """A source and a reader, each with a lease thread. Use as an async context manager."""

    def __init__(self, source: IdentityKeeper | None, reader: IdentityKeeper | None) -> None:
        self._identities = (source, reader)
        self.source, self.reader = SourceHeard(), ReaderHeard()
        self.attached: list[str] = []
        self.deaths: list[Exception] = []

    async def __aenter__(self) -> LeaseEnds:
        loop = asyncio.get_running_loop()
        self._threads = [LeaseThread(loop, Counter(), self.deaths.append, unrecorded("lease.thread")) for _ in range(2)]
        for thread in self._threads:
            thread.start()
        hello = SourceHello(FINGERPRINT, "s1", (), "stream", "agent", b"", 77)
        self._server = SourceServer(self._threads[0], self.source, lambda: hello, None, self._identities[0])
        self.address = await self._threads[0].run(self._server.start("127.0.0.1", KEY))
        attach = lambda told: self.attached.append(told.incarnation)  # noqa: E731
        connections = Connections(self._threads[1], FINGERPRINT, KEY, attach, self._identities[1])
        self.client = LeaseClient(self._threads[1], connections, self.reader)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self.deaths == []
        await self._threads[0].run(self._server.stop())
        for thread in self._threads:
            thread.call(thread._loop.stop)
            await asyncio.to_thread(thread._thread.join, 10)

    def open(self, sequence: int, address: str = "") -> None:
        want = WantPrefill((1, 2, 3), (), Sampling(max_tokens=2))
        self.client.open(f"lease-{sequence}", address or self.address, want, 0)

    async def heard(self, ear: SourceHeard | ReaderHeard, what: str) -> tuple[Any, ...]:
        """The next that is heard there has to be `what`."""
        async with asyncio.timeout(20):
            told = await ear.heard.get()
        assert told[0] == what, told
        return told

    async def opened(self, sequence: int) -> Any:
        """The source's end of a lease that is open."""
        self.open(sequence)
        return (await self.heard(self.source, "open"))[2]

    async def grant(self, lease: Any, index: int) -> None:
        """One record more, which the reader hears of."""
        record = GrantedRecord("page", index, 1, b"i" * 16, 7, 4, index)
        lease.send(Granted((record,)))
        assert (await self.heard(self.reader, "granted"))[2][0].record == index
