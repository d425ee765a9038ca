"""A reader's lease streams, on the lease thread's loop: messages in, messages out. What they mean is the leader's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from sluice_engine.leader.handoff.ports import LEASE_TTL_MS, ReaderEar, Why
from sluice_engine.leader.lease.at_hand import Hand
from sluice_engine.leader.lease.connections import Connection, Connections
from sluice_engine.leader.lease.thread import LeaseThread
from sluice_engine.leader.lease.watch import BadSource, SourceWatch
from sluice_protocol.codec import decode_source_messages, encode_reader_message
from sluice_protocol.generate import Refused
from sluice_protocol.source import Fetch, LastWord, Open, Pulled, ReaderMessage, SourceMessage, WantPrefill
from sluice_runtime import fault_points

# The source has so long to end a stream after the reader's last word.
LAST_WORD_S = 1.0


class LeaseClient:
    """`LeasePort`: every public method may be called from the leader's loop."""

    def __init__(self, thread: LeaseThread, connections: Connections, ear: ReaderEar) -> None:
        self._thread, self._connections, self._ear = thread, connections, ear
        self._watch: SourceWatch | None = None

    def open(self, lease_id: str, source: str, want: WantPrefill, have_prefix: int) -> ReaderLeaseStream:
        stream = ReaderLeaseStream(self._thread, self._connections, self._ear, lease_id, source, want, have_prefix)
        self._thread.call(self._begin, stream)
        return stream

    def look_after(self, sources: tuple[str, ...]) -> None:
        self._thread.call(self._use, sources)

    def watch(
        self,
        on_pair: Callable[[str, str, str], None],
        forget: Callable[[str], None],
        ping: Callable[[str, str], None],
    ) -> None:
        """Look after the sources of leases from now on; what is found is told on the leader's loop."""
        self._thread.call(self._begin_watch, SourceWatch(self._thread, self._connections, on_pair, forget, ping))

    # -- on the lease loop -----------------------------------------------------------------------------------------

    def _begin(self, stream: ReaderLeaseStream) -> None:
        self._use((stream.source,))
        stream.task = self._connections.spawn(stream.run())

    def _use(self, sources: tuple[str, ...]) -> None:
        if self._watch is not None:
            for source in sources:
                self._watch.use(source)

    def _begin_watch(self, watch: SourceWatch) -> None:
        self._watch = watch
        self._connections.spawn(watch.run()).add_done_callback(self._watch_ended)

    def _watch_ended(self, task: asyncio.Task[None]) -> None:
        """It never ends by itself: an error in it is this thread's."""
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._thread.fail(error)


class ReaderLeaseStream:
    """`ReaderStream`: one lease from its Open to its end. `end` may come at any time, also before the Hello."""

    def __init__(
        self,
        thread: LeaseThread,
        connections: Connections,
        ear: ReaderEar,
        lease_id: str,
        source: str,
        want: WantPrefill,
        have_prefix: int,
    ) -> None:
        self.source = source
        self.incarnation = ""
        self.quiet_since = float("inf")
        self.task: asyncio.Task[None] | None = None
        self._thread, self._connections, self._ear = thread, connections, ear
        self._lease_id, self._want, self._have_prefix = lease_id, want, have_prefix
        self._outbox: asyncio.Queue[ReaderMessage] = asyncio.Queue()
        self._call: Any = None
        self._has_last_word = False
        self._distrusts = False
        self._is_over = False
        self._hearing, self._saying = Hand(thread.at_hand), Hand(thread.at_hand)
        self._why = Why("LeaseEnded", "the source's stream ended")

    # -- from the leader's loop ------------------------------------------------------------------------------------

    def send(self, message: Pulled | Fetch) -> None:
        if self.quiet_since != float("inf"):
            self.quiet_since = time.monotonic()
        self._thread.call(self._outbox.put_nowait, message)

    def say_last(self, word: LastWord) -> None:
        self._thread.call(self._say_last, word)

    def end(self, *, distrust: bool = False) -> None:
        self._thread.call(self._end, distrust)

    # -- on the lease loop -----------------------------------------------------------------------------------------

    def _say_last(self, word: LastWord) -> None:
        self._has_last_word = True
        self._outbox.put_nowait(word)

    def _end(self, distrust: bool) -> None:
        self._distrusts = self._distrusts or distrust
        if self.task is not None and not (self._has_last_word or self._is_over):
            self.task.cancel()

    async def run(self) -> None:
        self._thread.streams += 1
        connection = self._connections.enter(self.source)
        try:
            await self._talk(connection)
        except asyncio.CancelledError:
            pass  # the leader has ended it
        except Exception as error:
            self._lost(error)
        finally:
            self._is_over = True
            self._thread.streams -= 1
            if self._call is not None:
                self._call.cancel()
            self._thread.tell_leader(self._ear.hear_end, self._lease_id, self._why)
            if self._distrusts:
                self._connections.distrust(self.source, connection)
            await self._connections.leave(connection)

    async def _talk(self, connection: Connection) -> None:
        hello = await asyncio.shield(connection.hello)
        self.incarnation = hello.incarnation
        self._call = connection.stub.Lease(metadata=self._connections.metadata)
        asked = self._want, self._have_prefix, LEASE_TTL_MS
        await self._write(Open(self._lease_id, hello.incarnation, self._connections.fingerprint, *asked))
        self.quiet_since = time.monotonic()
        reading = asyncio.get_running_loop().create_task(self._read())
        writing = asyncio.get_running_loop().create_task(self._write_all())
        try:
            await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
            await (reading if reading.done() else writing)  # the last word is out, or a write has failed
        finally:
            reading.cancel()
            writing.cancel()
            await asyncio.gather(reading, writing, return_exceptions=True)

    async def _write(self, message: ReaderMessage) -> None:
        self._saying.take(f"reader lease {self._lease_id}: sends {type(message).__name__}")
        try:
            await self._saying.for_peer(self._call.write(encode_reader_message(message)))
        finally:
            self._saying.put_down()

    async def _write_all(self) -> None:
        """Until the last word, after which the source is given a moment to end the stream: a call that is cancelled
        loses what was written to it."""
        while True:
            message = await self._outbox.get()
            if not isinstance(message, LastWord):
                await self._write(message)
                continue
            try:
                async with asyncio.timeout(LAST_WORD_S):
                    await self._write(message)
                    await self._call.done_writing()
                    await self._call.code()
            except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
                pass  # The source is gone or silent: nothing depends on its hearing this.
            return

    async def _read(self) -> None:
        """Until the stream ends. A call that is cancelled from below raises CancelledError here."""
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                self.quiet_since = time.monotonic()
                messages: list[SourceMessage] = []
                try:
                    messages.extend(decode_source_messages(message))
                finally:  # those before a malformed one count
                    if messages:
                        await self._hear(messages)
            code = await self._call.code()
            if code is not grpc.StatusCode.OK:
                self._why = Why("SourceLost", f"{code.name}: {await self._call.details()}")
                self._distrusts = self._distrusts or code is grpc.StatusCode.UNAVAILABLE
        except grpc.aio.AioRpcError as error:
            self._lost(error)
        except Exception as error:  # malformed, or no message at all
            self._thread.tell_leader(self._ear.hear_unknown, self._lease_id, str(error))

    async def _hear(self, messages: list[SourceMessage]) -> None:
        self._hearing.take(f"reader lease {self._lease_id}: {type(messages[-1]).__name__}")
        try:
            await fault_points.stay("lease.event")
            for message in messages:
                if isinstance(message, Refused) and message.reason == "IncarnationChanged":
                    self._distrusts = True
            self._thread.tell_leader(self._ear.hear, self._lease_id, messages)
        finally:
            self._hearing.put_down()

    def _lost(self, error: Exception) -> None:
        if isinstance(error, BadSource):
            self._why, self._distrusts = Why(error.reason, error.detail), True
        elif isinstance(error, grpc.aio.AioRpcError):
            mismatch = error.code() is grpc.StatusCode.FAILED_PRECONDITION
            detail = f"{error.code().name}: {error.details()}"
            self._why = Why("FingerprintMismatch" if mismatch else "SourceLost", detail)
            # Nothing there, or not willing: the next lease begins with Hello. Any other status is this lease's own.
            self._distrusts = mismatch or error.code() is grpc.StatusCode.UNAVAILABLE or not self.incarnation
        else:  # a Hello that does not decode or was given up, a write to a call that has ended
            self._why = Why("SourceLost", f"{type(error).__name__}: {error}")
            self._distrusts = not self.incarnation
