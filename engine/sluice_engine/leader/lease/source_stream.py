"""`sluice.v1.Source`: a source's lease streams, on the lease thread's loop. What messages mean is the leader's."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from sluice_engine.errors import EngineError
from sluice_engine.leader.handoff.ports import SourceEar, StreamEnd
from sluice_engine.leader.handoff.source import compare
from sluice_engine.leader.lease.at_hand import Hand
from sluice_engine.leader.lease.thread import LeaseThread
from sluice_protocol.codec import decode_reader_message, encode_source_hello, encode_source_messages
from sluice_protocol.fingerprint import Fingerprint
from sluice_protocol.generate import SCHEMA_VERSION
from sluice_protocol.source import ReaderMessage, RecordBytes, RecordName, SourceHello, SourceMessage
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
# A peer that takes nothing any more does not take a status either.
END_S = 2.0
_CODES = {
    StreamEnd.UNKNOWN_MESSAGE: grpc.StatusCode.UNIMPLEMENTED,
    StreamEnd.OUT_OF_TIME: grpc.StatusCode.DEADLINE_EXCEEDED,
}


class SourceService(source_pb2_grpc.SourceServicer):
    """`hello` is asked anew each time: a fence changes the transport's part of it."""

    def __init__(self, thread: LeaseThread, ear: SourceEar, hello: Hello, read_records: ReadRecords | None) -> None:
        self._thread, self._ear = thread, ear
        self._hello = hello
        self._read_records = read_records

    async def Hello(self, request: source_pb2.SourceHelloRequest, context: Any) -> source_pb2.SourceHelloReply:
        mine = await self._present(context)
        if request.schema_version != SCHEMA_VERSION:
            detail = f"schema_version is {request.schema_version}, this source speaks {SCHEMA_VERSION}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, detail)
        refused = compare(mine, Fingerprint.of(request.fingerprint))
        if refused is not None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{refused.reason}: {refused.detail}")
        return encode_source_hello(mine)

    async def Lease(  # type: ignore[override]  # the coroutine form of a stream handler
        self, request_iterator: object, context: Any
    ) -> None:
        hello = await self._present(context)
        await SourceLeaseStream(self._thread, self._ear, hello, self._read_records, context).run()

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
        ear: SourceEar,
        hello: Hello,
        read_records: ReadRecords | None,
        identity: IdentityKeeper | None = None,
    ) -> None:
        self._service = SourceService(thread, ear, hello, read_records)
        self._identity = identity
        self._server: grpc.aio.Server | None = None

    async def start(self, host: str, key: str, port: int = 0) -> str:
        """The address; port 0: picked by the system. Raises RuntimeError when it is taken."""
        self._server = build_server(key, self._identity)
        source_pb2_grpc.add_SourceServicer_to_server(self._service, self._server)
        bound = bind(self._server, join(host, port), self._identity)
        await self._server.start()
        return join(host, bound)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)


class SourceLeaseStream:
    """`SourceStream`. `send`, `send_bytes` and `end` may be called from the leader's loop."""

    def __init__(
        self,
        thread: LeaseThread,
        ear: SourceEar,
        hello: SourceHello,
        read_records: ReadRecords | None,
        context: Any,
    ) -> None:
        self.hello = hello
        self.peer = host_of(context.peer())
        self._thread, self._ear, self._read_records, self._context = thread, ear, read_records, context
        self._outbox: deque[SourceMessage | tuple[RecordName, ...]] = deque()
        self._wake = asyncio.Event()
        self._end: tuple[StreamEnd, str] | None = None
        self._is_over = False
        # A stream that says nothing at first, or is not read at its end, ends all the same.
        self._limit = asyncio.timeout(OPEN_S)
        self._hearing, self._saying = Hand(thread.at_hand), Hand(thread.at_hand)

    # -- from the leader's loop ------------------------------------------------------------------------------------

    def send(self, *messages: SourceMessage) -> None:
        self._thread.call(self._put, messages)

    def send_bytes(self, names: tuple[RecordName, ...]) -> None:
        self._thread.call(self._put, (names,))

    def end(self, how: StreamEnd = StreamEnd.OK, detail: str = "") -> None:
        self._thread.call(self._put_end, how, detail)

    # -- on the lease loop -----------------------------------------------------------------------------------------

    def _put(self, messages: tuple[SourceMessage | tuple[RecordName, ...], ...]) -> None:
        self._outbox.extend(messages)
        self._wake.set()

    def _put_end(self, how: StreamEnd, detail: str) -> None:
        """A reader whose time is over may be one that takes nothing: what was not sent yet is not sent any more."""
        if self._end is not None or not self._is_limited:
            return
        self._end, now = (how, detail), asyncio.get_running_loop().time()
        if how is StreamEnd.OUT_OF_TIME:
            self._limit.reschedule(now)
        else:
            self._limit.reschedule(now + END_S)
            self._wake.set()

    async def run(self) -> None:
        self._thread.streams += 1
        reading = asyncio.create_task(self._read())
        try:
            async with self._limit:
                await self._write()
        except TimeoutError:
            if not self._limit.expired():
                raise
            how, detail = self._end or (StreamEnd.OUT_OF_TIME, "lease: its ttl ran out")
            async with asyncio.timeout(END_S):
                await self._context.abort(_CODES.get(how, grpc.StatusCode.DEADLINE_EXCEEDED), detail)
        finally:
            self._thread.streams -= 1
            reading.cancel()
            # The handler may be cancelled at any time; the hold ends with the stream all the same.
            self._tell(self._ear.hear_end)
            self._is_over = True

    async def _write(self) -> None:
        """What the leader sends, in its order, until it has ended the stream."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outbox:
                await self._flush()
            if self._end is not None:
                how, detail = self._end
                if how is not StreamEnd.OK:
                    await self._saying.for_peer(self._context.abort(_CODES[how], detail))
                return

    async def _flush(self) -> None:
        """One gRPC message for all that is to be said: each costs as much as a dozen of ours."""
        said: list[SourceMessage] = []
        while self._outbox and len(said) < MOST_AT_ONCE:
            if isinstance(names := self._outbox[0], tuple):
                if not said:
                    self._outbox.popleft()
                    await self._send_bytes(names)
                    return
                break
            said.append(names)
            self._outbox.popleft()
        self._saying.take(f"source lease: sends {type(said[-1]).__name__}")
        try:
            await self._saying.for_peer(self._context.write(encode_source_messages(said)))
        finally:
            self._saying.put_down()

    async def _send_bytes(self, names: tuple[RecordName, ...]) -> None:
        if self._read_records is None:
            self._tell(self._ear.hear_unknown, "Fetch over another transport")
            return
        try:
            async for data in self._read_records(names):
                await self._saying.for_peer(self._context.write(encode_source_messages([data])))
        except EngineError as error:  # a generation that has ended
            self._tell(self._ear.hear_unknown, str(error))

    async def _read(self) -> None:
        """Until the stream ends. Whatever cannot be read or understood is told as such and ends it: a reader task that
        died in silence would leave its lease to itself."""
        try:
            while (message := await self._context.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                fault_points.reach("lease.message")
                await self._hear(decode_reader_message(message))
            self._tell(self._ear.hear_end)
            self._put_end(StreamEnd.OK, "")
        except Exception as error:  # bytes that are no message at all come as gRPC's own errors
            self._limit_rest()
            self._tell(self._ear.hear_unknown, str(error))

    async def _hear(self, message: ReaderMessage) -> None:
        self._hearing.take(f"source lease: {type(message).__name__}")
        try:
            await fault_points.stay("lease.event")
            self._limit_rest()
            self._tell(self._ear.hear, (message,))
        finally:
            self._hearing.put_down()

    def _limit_rest(self) -> None:
        """The leader decides how long the lease may last, once it has heard of it."""
        if self._end is None and self._is_limited:
            self._limit.reschedule(None)

    @property
    def _is_limited(self) -> bool:
        """Whether the limit can still be moved."""
        return not (self._is_over or self._limit.expired())

    def _tell(self, hear: Callable[..., None], *args: object) -> None:
        """The end of the stream is the last that the leader hears of it."""
        if not self._is_over:
            self._thread.tell_leader(hear, self, *args)
