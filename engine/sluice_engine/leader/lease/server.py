"""`sluice.v1.Source`: the source's end of every lease, on the lease thread's loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from sluice_engine.errors import EngineError
from sluice_engine.leader.lease.at_hand import Hand
from sluice_engine.leader.lease.rooms import LEASE_TTL_MS
from sluice_engine.leader.lease.thread import LeaseThread
from sluice_protocol.codec import decode_reader_message, encode_source_hello, encode_source_messages
from sluice_protocol.fingerprint import Fingerprint
from sluice_protocol.generate import SCHEMA_VERSION, Refused
from sluice_protocol.lease import Lease, LeaseEffect, LeaseEvent, LeaseProtocolError, LeaseRole, LeaseState
from sluice_protocol.source import (
    Fetch,
    GrantedRecord,
    Mismatch,
    Open,
    Progress,
    Pulled,
    ReaderMessage,
    RecordBytes,
    RecordName,
    Released,
    SourceHello,
    SourceMessage,
)
from sluice_protocol.v1 import source_pb2, source_pb2_grpc
from sluice_runtime import fault_points
from sluice_runtime.address import host_of, join
from sluice_runtime.rpc.keyed_server import build_server
from sluice_runtime.tls.keeper import IdentityKeeper
from sluice_runtime.tls.server import bind

Hello = Callable[[], SourceHello | None]
ReadRecords = Callable[[tuple[RecordName, ...]], AsyncIterator[RecordBytes]]

# A stream that says nothing is no lease.
OPEN_S = 10.0
# Messages of a lease that travel together, at most: a grant of a long prompt's chunk has dozens of records.
MOST_AT_ONCE = 32
REASSURE_S = 2.0
# A peer that takes nothing any more does not take a status either.
ABORT_S = 2.0
# What a reader has for a lease that is complete; its own limits are tighter.
PULL_BASE_S, PULL_BYTES_PER_S = 10.0, 10e6

_SENDS = frozenset(
    {
        LeaseEffect.SEND_ADMITTED,
        LeaseEffect.SEND_REFUSED,
        LeaseEffect.SEND_GRANTED,
        LeaseEffect.SEND_FIRST_TOKEN,
        LeaseEffect.SEND_COMPLETE,
    }
)


class SourceService(source_pb2_grpc.SourceServicer):
    """`hello` is asked anew each time: a fence changes the transport's part of it."""

    def __init__(self, thread: LeaseThread, hello: Hello, read_records: ReadRecords | None) -> None:
        self._thread = thread
        self._hello = hello
        self._read_records = read_records

    async def Hello(self, request: source_pb2.SourceHelloRequest, context: Any) -> source_pb2.SourceHelloReply:
        mine = await self._present(context)
        if request.schema_version != SCHEMA_VERSION:
            detail = f"schema_version is {request.schema_version}, this source speaks {SCHEMA_VERSION}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, detail)
        refused = _compare(mine, Fingerprint.of(request.fingerprint))
        if refused is not None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{refused.reason}: {refused.detail}")
        return encode_source_hello(mine)

    async def Lease(  # type: ignore[override]  # the coroutine form of a stream handler
        self, request_iterator: object, context: Any
    ) -> None:
        hello = await self._present(context)
        await _SourceLease(self._thread, hello, self._read_records, context).run()

    async def _present(self, context: Any) -> SourceHello:
        hello = self._hello()
        if hello is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the transport is being started again")
            raise AssertionError("abort returned")
        return hello


class SourceServer:
    """The gRPC server of a source; lives on the lease loop from `start` to `stop`."""

    def __init__(
        self,
        thread: LeaseThread,
        hello: Hello,
        read_records: ReadRecords | None,
        identity: IdentityKeeper | None = None,
    ) -> None:
        self._service = SourceService(thread, hello, read_records)
        self._identity = identity
        self._server: grpc.aio.Server | None = None

    async def start(self, host: str, key: str, port: int = 0) -> str:
        """The address; port 0: picked by the system. Raises RuntimeError when it is taken."""
        self._server = build_server(key, self._identity)
        source_pb2_grpc.add_SourceServicer_to_server(self._service, self._server)
        bound = bind(self._server, join(host, port), self._identity)
        await self._server.start()
        return join(host, bound)


def _compare(mine: SourceHello, fingerprint: Fingerprint) -> Refused | None:
    names = mine.fingerprint.differences(fingerprint)
    if not names:
        return None
    theirs, ours = fingerprint.as_dict(), mine.fingerprint.as_dict()
    detail = "; ".join(f"{name}: {theirs.get(name)} there, {ours.get(name)} here" for name in names)
    return Refused("FingerprintMismatch", detail)


def _event_of(message: ReaderMessage) -> tuple[LeaseEvent, ReaderMessage]:
    match message:
        case Open():
            return LeaseEvent.OPEN, message
        case Pulled():
            return LeaseEvent.PULLED, message
        case Fetch():
            return LeaseEvent.FETCH, message
        case Mismatch():
            return LeaseEvent.MISMATCH, message
        case Progress():
            return LeaseEvent.PROGRESS, message


class _SourceLease:
    """Drives one lease. All state is the lease loop's; `post` may be called from any thread."""

    def __init__(self, thread: LeaseThread, hello: SourceHello, read_records: ReadRecords | None, context: Any) -> None:
        self._thread = thread
        self._hello = hello
        self._read_records = read_records
        self._context = context
        self._lease = Lease(LeaseRole.SOURCE)
        self._events: asyncio.Queue[tuple[LeaseEvent, Any]] = asyncio.Queue()
        self._granted: list[GrantedRecord] = []
        self._outbox: list[SourceMessage] = []
        self._ttl = asyncio.timeout(OPEN_S)
        self._asked = False
        self._reassuring: asyncio.TimerHandle | None = None
        self._hand = Hand(thread.at_hand)
        self._pull_budget_s = 0.0

    def post(self, event: LeaseEvent, message: object) -> None:
        self._thread.call(self._events.put_nowait, (event, message))

    async def run(self) -> None:
        self._thread.counters["source_leases_opened"] += 1
        reading = asyncio.create_task(self._read())
        try:
            # The ttl ends the lease also while a write waits for a reader that does not read.
            async with self._ttl:
                await self._drive()
        except TimeoutError:
            if not self._ttl.expired():
                raise
            why = "its ttl ran out"
            if self._lease.state is LeaseState.COMPLETE:
                self._lease.on(LeaseEvent.STALLED)
                self._thread.tell_leader(self._thread.rooms.on_stalled, self, self._pull_budget_s)
                why = f"complete, and not pulled within {self._pull_budget_s:.0f} s"
            elif not self._lease.ended:
                self._lease.on(LeaseEvent.TTL)
            self._tell_ended()
            async with asyncio.timeout(ABORT_S):
                await self._context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"lease: {why}")
        finally:
            reading.cancel()
            if self._reassuring is not None:
                self._reassuring.cancel()
            # The handler may be cancelled between two effects; the hold ends with the stream all the same.
            self._tell_ended()

    async def _drive(self) -> None:
        while not self._lease.ended:
            event, payload = await self._events.get()
            self._hand.take(f"source lease: {event}")
            try:
                await fault_points.stay("lease.event")
                await self._on(event, payload)
            finally:
                self._hand.put_down()
            if self._events.empty() or self._lease.ended or len(self._outbox) >= MOST_AT_ONCE:
                await self._flush()

    async def _flush(self) -> None:
        """One gRPC message for all that is to be said: each costs as much as a dozen of ours."""
        if self._outbox:
            said, self._outbox = self._outbox, []
            await self._hand.for_peer(self._context.write(encode_source_messages(said)))

    async def _read(self) -> None:
        """Messages to events, until the stream ends. Whatever cannot be read or understood becomes UNKNOWN and ends it:
        a reader task that died in silence would leave its lease to nobody."""
        try:
            while (message := await self._context.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                fault_points.reach("lease.message")
                self._events.put_nowait(_event_of(decode_reader_message(message)))
            self._events.put_nowait((LeaseEvent.STREAM_ENDED, None))
        except Exception as error:  # bytes that are no message at all come as gRPC's own errors
            self._events.put_nowait((LeaseEvent.UNKNOWN, error))

    async def _on(self, event: LeaseEvent, payload: Any) -> None:
        try:
            effects = self._lease.on(event)
        except LeaseProtocolError as error:
            payload = error
            effects = self._lease.on(LeaseEvent.UNKNOWN)
            event = LeaseEvent.UNKNOWN
        if event is LeaseEvent.ADMITTED:
            self._reassure()
        if event is LeaseEvent.COMPLETE:
            self._limit_pull(payload.num_bytes)
        for effect in effects:
            if effect is LeaseEffect.END_STREAM and event is LeaseEvent.UNKNOWN:
                continue  # aborted below, after the rest
            await self._do(effect, payload)
        if event is LeaseEvent.UNKNOWN:
            await self._hand.for_peer(self._context.abort(grpc.StatusCode.UNIMPLEMENTED, f"lease: {payload}"))

    def _limit_pull(self, num_bytes: int) -> None:
        """From here on only the reader has something to do. It may be slow, and it may lie: its records are held for as
        long as they take at PULL_BYTES_PER_S, and no longer."""
        self._pull_budget_s = PULL_BASE_S + num_bytes / PULL_BYTES_PER_S
        until = asyncio.get_running_loop().time() + self._pull_budget_s
        self._ttl.reschedule(min(until, self._ttl.when() or until))

    def _reassure(self) -> None:
        """While it is computed, the reader hears now and then that it is. The leader says so, from its own books: one
        that has lost this lease says nothing, and nobody waits for ever for what got lost between two threads."""
        if self._reassuring is not None:
            self._thread.tell_leader(self._thread.rooms.reassure, self)
        if self._lease.state is LeaseState.GRANTING:
            self._reassuring = asyncio.get_running_loop().call_later(REASSURE_S, self._reassure)

    async def _do(self, effect: LeaseEffect, payload: Any) -> None:
        if effect in _SENDS:
            if effect is LeaseEffect.SEND_GRANTED:
                self._granted.extend(payload.records)
            self._outbox.append(payload)
        elif effect is LeaseEffect.DECIDE:
            self._decide(payload)
        elif effect is LeaseEffect.SEND_RELEASED:
            names = tuple(record.name for record in self._granted)
            self._outbox.append(Released(names))
            await self._flush()  # while the records are still held: LEASE_ENDED follows
        elif effect is LeaseEffect.SEND_BYTES:
            await self._send_bytes(payload)
        elif effect is LeaseEffect.SUSPECT:
            self._thread.tell_leader(self._thread.rooms.on_mismatch, self, payload)
        elif effect is LeaseEffect.NOTE_PROGRESS:
            self._thread.tell_leader(self._thread.rooms.on_progress, self, payload)
        elif effect is LeaseEffect.LEASE_ENDED:
            self._tell_ended()
        elif effect is LeaseEffect.COUNT_UNKNOWN:
            self._thread.counters["unknown_messages"] += 1

    def _decide(self, opened: Open) -> None:
        refused = _compare(self._hello, opened.fingerprint)
        if refused is None and opened.incarnation != self._hello.incarnation:
            refused = Refused(
                "IncarnationChanged", f"{opened.incarnation} is gone, {self._hello.incarnation} is here: say Hello", 1
            )
        if refused is not None:
            self._events.put_nowait((LeaseEvent.REFUSED, refused))
            return
        self._asked = True
        self._ttl.reschedule(asyncio.get_running_loop().time() + min(opened.ttl_ms, LEASE_TTL_MS) / 1e3)
        self._thread.tell_leader(self._thread.rooms.open_source, opened, self, host_of(self._context.peer()))

    async def _send_bytes(self, fetch: Fetch) -> None:
        granted = {record.name for record in self._granted}
        if self._read_records is None or not granted.issuperset(fetch.records):
            self._events.put_nowait((LeaseEvent.UNKNOWN, "Fetch of what was not granted, or over another transport"))
            return
        try:
            async for data in self._read_records(fetch.records):
                self._outbox.append(data)
                await self._flush()
        except EngineError as error:  # a life that has ended
            self._events.put_nowait((LeaseEvent.UNKNOWN, error))

    def _tell_ended(self) -> None:
        """Once, and only where the leader was asked at all."""
        if self._asked:
            self._asked = False
            self._thread.tell_leader(self._thread.rooms.lease_ended, self)
