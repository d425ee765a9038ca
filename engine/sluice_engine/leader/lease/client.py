"""The reader's end of every lease, on the lease thread's loop: opens, hears grants, says Pulled, commits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from sluice_engine.leader.lease.at_hand import Hand
from sluice_engine.leader.lease.rooms import LEASE_TTL_MS
from sluice_engine.leader.lease.thread import LeaseThread
from sluice_engine.leader.lease.watch import BadSource, SourceWatch
from sluice_protocol.codec import (
    decode_source_hello,
    decode_source_messages,
    encode_reader_message,
)
from sluice_protocol.fingerprint import Fingerprint
from sluice_protocol.generate import SCHEMA_VERSION, Refused
from sluice_protocol.lease import Lease, LeaseEffect, LeaseEvent, LeaseProtocolError, LeaseRole, LeaseState
from sluice_protocol.source import (
    Complete,
    Fetch,
    FirstToken,
    Granted,
    GrantedRecord,
    LastWord,
    LeaseAdmitted,
    Open,
    Pulled,
    RecordBytes,
    Released,
    SourceHello,
    SourceMessage,
    WantPrefill,
)
from sluice_protocol.v1 import source_pb2, source_pb2_grpc
from sluice_runtime import fault_points
from sluice_runtime.rpc.options import KEY_HEADER, OPTIONS
from sluice_runtime.tls.client import open_channel
from sluice_runtime.tls.diagnosis import why_not
from sluice_runtime.tls.identity import Identity
from sluice_runtime.tls.keeper import IdentityKeeper
from sluice_runtime.tls.peers import Peer

HELLO_TIMEOUT_S = 10.0
# A source answers an Open and a Pulled at once, whatever it computes; one that does not will not be waited for.
MIN_ANSWER_S = 5.0
# One that computes says now and then that it still means to, be it by a Granted of nothing.
MIN_SILENT_S = 10.0
LAST_WORD_S = 1.0
_AWAITED = {LeaseEvent.OPEN: "Open", LeaseEvent.PULLS_DONE: "Pulled"}


@dataclass(slots=True)
class _Peer:
    """One life of one source. `rooms` use its channel; `stale`: the next room says Hello on a new one. `identity`:
    ours, as it was shown to it."""

    identity: Identity | None
    channel: grpc.aio.Channel
    stub: Any
    hello: asyncio.Task[SourceHello]
    rooms: int = 0
    stale: bool = False


def event_of(message: SourceMessage) -> LeaseEvent:
    match message:
        case LeaseAdmitted():
            return LeaseEvent.ADMITTED
        case Refused():
            return LeaseEvent.REFUSED
        case Granted():
            return LeaseEvent.GRANTED
        case FirstToken():
            return LeaseEvent.FIRST_TOKEN_ENDS if message.ends else LeaseEvent.FIRST_TOKEN
        case Complete():
            return LeaseEvent.COMPLETE
        case Released():
            return LeaseEvent.RELEASED
        case RecordBytes():
            return LeaseEvent.BYTES


class LeaseClient:
    """`LeasePort` for the leader: every public method may be called from its loop. One Hello per source and life."""

    def __init__(
        self,
        thread: LeaseThread,
        fingerprint: Fingerprint,
        key: str,
        attach: Callable[[SourceHello], None],
        feed: Callable[[str, RecordBytes], None] | None = None,
        answer_s: float = MIN_ANSWER_S,
        silent_s: float = MIN_SILENT_S,
        identity: IdentityKeeper | None = None,
    ) -> None:
        """`attach` (on the leader's loop) shows the transport a new source; `feed` takes bytes of the stream
        transport; `answer_s`: how long a source may say nothing where it has to answer, `silent_s`: and while it
        computes."""
        self.thread = thread
        self.fingerprint = fingerprint
        self.metadata = ((KEY_HEADER, key),)
        self.attach = attach
        self.feed = feed
        self._identity = identity
        self.answer_s, self.silent_s = answer_s, silent_s
        self._peers: dict[str, _Peer] = {}
        self._rooms: dict[int, _ReaderLease] = {}
        self._watch: SourceWatch | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # -- LeasePort -------------------------------------------------------------------------------------------------

    def open_reader(self, sequence: int, lease_id: str, address: str, want: WantPrefill, have_prefix: int) -> None:
        self.thread.call(self._open, sequence, lease_id, address, want, have_prefix)

    def look_after(self, sources: tuple[str, ...]) -> None:
        self.thread.call(self._look_after, sources)

    def reader_event(self, sequence: int, event: LeaseEvent, last_word: LastWord | None = None) -> None:
        self.thread.call(self._post, sequence, event, last_word)

    def fetch(self, sequence: int, fetch: Fetch) -> None:
        """Stream transport: ask for bytes on the lease itself."""
        self.thread.call(self._fetch, sequence, fetch)

    def watch(
        self,
        on_pair: Callable[[str, str, str], None],
        forget: Callable[[str], None],
        ping: Callable[[str, str], None],
    ) -> None:
        """Look after the sources of leases from now on; what is found is told on the leader's loop."""
        self.thread.call(self._begin_watch, SourceWatch(self, on_pair, forget, ping))

    # -- on the lease loop -----------------------------------------------------------------------------------------

    def _open(self, sequence: int, lease_id: str, address: str, want: WantPrefill, have_prefix: int) -> None:
        if self._watch is not None:
            self._watch.use(address)
        room = _ReaderLease(self, sequence, lease_id, address, want, have_prefix)
        self._rooms[sequence] = room
        task = asyncio.get_running_loop().create_task(room.run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _look_after(self, sources: tuple[str, ...]) -> None:
        if self._watch is not None:
            for source in sources:
                self._watch.use(source)

    def _begin_watch(self, watch: SourceWatch) -> None:
        self._watch = watch
        task = asyncio.get_running_loop().create_task(watch.run())
        self._tasks.add(task)
        task.add_done_callback(self._watch_ended)

    def _watch_ended(self, task: asyncio.Task[None]) -> None:
        """It never ends by itself: an error in it is this thread's."""
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self.thread.fail(error)

    def _post(self, sequence: int, event: LeaseEvent, last_word: LastWord | None) -> None:
        room = self._rooms.get(sequence)
        if room is not None:
            room.events.put_nowait((event, last_word))

    def _fetch(self, sequence: int, fetch: Fetch) -> None:
        room = self._rooms.get(sequence)
        if room is not None:
            room.fetch(fetch)

    def forget(self, sequence: int) -> None:
        self._rooms.pop(sequence, None)

    def enter(self, address: str) -> _Peer:
        """The source at `address`, for one room more. Every `enter` is followed by a `leave`."""
        peer, identity = self._peers.get(address), None if self._identity is None else self._identity.current
        if peer is not None and peer.identity is not identity:
            self._retire(address, peer)
            peer = None
        if peer is None:
            channel = open_channel(address, Peer.PREFILL, identity, OPTIONS)
            stub = source_pb2_grpc.SourceStub(channel)
            hello = asyncio.get_running_loop().create_task(self._hello(address, stub, identity))
            peer = self._peers[address] = _Peer(identity, channel, stub, hello)
        peer.rooms += 1
        return peer

    def distrust(self, address: str, peer: _Peer) -> None:
        """Whoever answers there next says Hello first. Rooms that run on this channel go on."""
        peer.stale = True
        if self._peers.get(address) is peer:
            del self._peers[address]

    async def leave(self, peer: _Peer) -> None:
        peer.rooms -= 1
        if peer.stale and peer.rooms == 0:
            await self._end(peer)

    def _retire(self, address: str, peer: _Peer) -> None:
        """As `distrust`, from outside of its rooms: there may be none, and so nobody who leaves last."""
        self.distrust(address, peer)
        if peer.rooms == 0:
            task = asyncio.get_running_loop().create_task(self._end(peer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _end(self, peer: _Peer) -> None:
        peer.hello.cancel()
        await peer.channel.close(None)

    def forget_source(self, incarnation: str) -> None:
        """From the leader's loop: the transport would not have it."""
        self.thread.call(self._forget_source, incarnation)

    def _forget_source(self, incarnation: str) -> None:
        for address, peer in list(self._peers.items()):
            known = peer.hello.done() and not peer.hello.cancelled() and peer.hello.exception() is None
            if known and peer.hello.result().incarnation == incarnation:
                self._retire(address, peer)

    async def _hello(self, address: str, stub: Any, identity: Identity | None) -> SourceHello:
        try:
            hello = await self._call_hello(stub, HELLO_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            is_connection = error.code() is grpc.StatusCode.UNAVAILABLE
            if is_connection and (why := await why_not(address, Peer.PREFILL, identity)):
                raise BadSource("SourceLost", f"TLS: {why}") from error
            raise
        names = hello.fingerprint.differences(self.fingerprint)
        if names:
            raise BadSource("FingerprintMismatch", f"source and reader differ in {', '.join(names)}")
        self.thread.tell_leader(self.attach, hello)
        return hello

    async def _call_hello(self, stub: Any, timeout_s: float) -> SourceHello:
        request = source_pb2.SourceHelloRequest(schema_version=SCHEMA_VERSION, fingerprint=self.fingerprint.as_dict())
        return decode_source_hello(await stub.Hello(request, metadata=self.metadata, timeout=timeout_s))

    async def ask_hello(self, stub: Any, timeout_s: float) -> SourceHello:
        """Once more, of a source that has said it before. Raises BadSource."""
        try:
            return await self._call_hello(stub, timeout_s)
        except grpc.aio.AioRpcError as error:
            is_late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            detail = f"{error.code().name}: {error.details()}"
            raise BadSource("SourceSilent" if is_late else "SourceLost", detail) from error
        except Exception as error:  # what does not decode
            raise BadSource("SourceLost", f"{type(error).__name__}: {error}") from error


class _ReaderLease:
    """Drives one lease from its Open to its end."""

    def __init__(
        self, client: LeaseClient, sequence: int, lease_id: str, address: str, want: WantPrefill, have_prefix: int
    ) -> None:
        self._client = client
        self._sequence = sequence
        self._lease_id = lease_id
        self._address = address
        self._want = want
        self._have_prefix = have_prefix
        self._lease = Lease(LeaseRole.READER)
        self.events: asyncio.Queue[tuple[LeaseEvent, Any]] = asyncio.Queue()
        self._fetches: asyncio.Queue[Fetch] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._granted: list[GrantedRecord] = []
        self._hello: SourceHello | None = None
        self._source_pid = 0
        self._call: Any = None
        self._distrusts = False
        self._hand = Hand(client.thread.at_hand)
        self._patience: asyncio.TimerHandle | None = None
        self._why = ("LeaseEnded", "the source's stream ended")

    async def run(self) -> None:
        peer = self._client.enter(self._address)
        try:
            if await self._heard_hello(peer):
                self._call = peer.stub.Lease(metadata=self._client.metadata)
                await self._on(LeaseEvent.OPEN, None)
                self._tasks.append(asyncio.get_running_loop().create_task(self._read()))
            while not self._lease.ended:
                await self._on(*await self.events.get())
        except Exception as error:
            self._lost(error)
        finally:
            for task in self._tasks:
                task.cancel()
            if self._patience is not None:
                self._patience.cancel()
            if self._call is not None:
                self._call.cancel()
            self._client.forget(self._sequence)
            if not self._lease.ended:
                self._tell("on_failed", *self._why)
            if self._distrusts:
                self._client.distrust(self._address, peer)
            await self._client.leave(peer)

    async def _heard_hello(self, peer: _Peer) -> bool:
        """Wait for the source's Hello, and for whatever may end this room before it; False when that came first."""
        if peer.hello.done() and self.events.empty():  # all rooms of a source but the first
            self._hello = peer.hello.result()
            return True
        event = asyncio.ensure_future(self.events.get())
        try:
            await asyncio.wait({peer.hello, event}, return_when=asyncio.FIRST_COMPLETED)
            if event.done():
                await self._on(*event.result())
                return False
        finally:
            event.cancel()
        self._hello = peer.hello.result()
        return True

    def _lost(self, error: BaseException) -> None:
        if isinstance(error, BadSource):
            self._why, self._distrusts = (error.reason, error.detail), True
        elif isinstance(error, grpc.aio.AioRpcError):
            mismatch = error.code() is grpc.StatusCode.FAILED_PRECONDITION
            detail = f"{error.code().name}: {error.details()}"
            self._why = ("FingerprintMismatch" if mismatch else "SourceLost", detail)
            # Nobody there, or not willing: the next room begins with Hello. Any other status is this lease's own.
            self._distrusts = mismatch or error.code() is grpc.StatusCode.UNAVAILABLE or self._hello is None
        else:  # a Hello that does not decode or was given up, a write to a call that has ended
            self._why = ("SourceLost", f"{type(error).__name__}: {error}")
            self._distrusts = self._hello is None

    async def _read(self) -> None:
        """Messages to events. However it ends, the room hears of it: a call that is cancelled from below raises
        CancelledError here, which no `except Exception` sees."""
        last = LeaseEvent.STREAM_ENDED
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                for value in decode_source_messages(message):
                    self.events.put_nowait((event_of(value), value))
            code = await self._call.code()
            if code is not grpc.StatusCode.OK:
                self._why = ("SourceLost", f"{code.name}: {await self._call.details()}")
                self._distrusts = code is grpc.StatusCode.UNAVAILABLE
        except grpc.aio.AioRpcError as error:
            self._lost(error)
        except Exception as error:  # malformed, or no message at all
            self._why, last = ("UnknownMessage", str(error)), LeaseEvent.UNKNOWN
        finally:
            self.events.put_nowait((last, None))

    def fetch(self, fetch: Fetch) -> None:
        """Stream transport: to be asked for on the lease, in order. Other rooms have no task for it."""
        if self._fetches is None:
            self._fetches = asyncio.Queue()
            self._tasks.append(asyncio.get_running_loop().create_task(self._send_fetches(self._fetches)))
        self._fetches.put_nowait(fetch)

    async def _send_fetches(self, fetches: asyncio.Queue[Fetch]) -> None:
        while True:
            fetch = await fetches.get()
            if not self._lease.ended:
                await self._call.write(encode_reader_message(fetch))

    async def _on(self, event: LeaseEvent, payload: Any) -> None:
        self._hand.take(f"reader lease {self._lease_id}: {event}")
        try:
            await fault_points.stay("lease.event")
            await self._take(event, payload)
        finally:
            self._hand.put_down()

    async def _take(self, event: LeaseEvent, payload: Any) -> None:
        try:
            effects = self._lease.on(event)
        except LeaseProtocolError as error:
            self._why = ("LeaseProtocolError", str(error))
            effects = self._lease.on(LeaseEvent.UNKNOWN)
        if event is LeaseEvent.REFUSED:
            self._why = (payload.reason, payload.detail)
            self._distrusts = payload.reason == "IncarnationChanged"
        if event is LeaseEvent.ADMITTED:
            self._source_pid = payload.pid
        if event is LeaseEvent.COMPLETE:
            self._tell("on_complete", payload)
        self._be_patient(event)
        for effect in effects:
            await self._do(effect, payload)

    def _be_patient(self, event: LeaseEvent) -> None:
        """After `event` an answer is due, or has come."""
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        if self._lease.state is LeaseState.GRANTING:
            self._wait(self._client.silent_s, "said anything of this room")
        elif event in _AWAITED and not self._lease.ended:
            self._wait(self._client.answer_s, f"answered {_AWAITED[event]}")

    def _wait(self, seconds: float, what: str) -> None:
        why = f"the source has not {what} for {seconds:.0f} s"
        self._patience = asyncio.get_running_loop().call_later(seconds, self._give_up, why)

    def _give_up(self, why: str) -> None:
        self._why = ("SourceSilent", why)
        self._distrusts = True
        self.events.put_nowait((LeaseEvent.TTL, None))

    async def _do(self, effect: LeaseEffect, payload: Any) -> None:
        match effect:
            case LeaseEffect.SEND_OPEN:
                await self._send_open()
            case LeaseEffect.SEND_PULLED:
                await self._hand.for_peer(self._call.write(encode_reader_message(Pulled())))
            case LeaseEffect.SEND_LAST_WORD:
                await self._hand.for_peer(self._say_last(payload))
            case LeaseEffect.AUTHORISE_PULL:
                assert self._hello is not None
                if payload.records:  # a source that says that it is still at it grants nothing
                    self._granted.extend(payload.records)
                    self._tell("on_granted", self._hello.incarnation, payload.records)
            case LeaseEffect.PUBLISH_TOKEN:
                self._tell("on_first_token", payload, self._source_pid)
            case LeaseEffect.FEED_BYTES:
                if self._client.feed is not None:
                    self._client.thread.tell_leader(self._client.feed, self._lease_id, payload)
            case LeaseEffect.COMMIT:
                self._commit(payload)
            case LeaseEffect.FAIL_ROOM:
                self._tell("on_failed", *self._why)
            case LeaseEffect.COUNT_UNKNOWN:
                self._client.thread.counters["unknown_messages"] += 1
            case _:
                pass  # STOP_PULLING is the leader's part of the first token; END_STREAM follows from `ended`

    async def _say_last(self, word: LastWord) -> None:
        """A call that is cancelled loses what was written to it, so the source is given a moment to end the stream."""
        try:
            async with asyncio.timeout(LAST_WORD_S):
                await self._call.write(encode_reader_message(word))
                await self._call.done_writing()
                await self._call.code()
        except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # The source is gone or silent: nothing depends on its hearing this.

    async def _send_open(self) -> None:
        assert self._hello is not None
        opened = Open(
            self._lease_id,
            self._hello.incarnation,
            self._client.fingerprint,
            self._want,
            self._have_prefix,
            LEASE_TTL_MS,
        )
        await self._hand.for_peer(self._call.write(encode_reader_message(opened)))

    def _commit(self, released: Released) -> None:
        """Only what was still held after the last byte, in the very lives that were granted."""
        if set(released.records) == {record.name for record in self._granted}:
            self._tell("on_committed")
        else:
            self._tell("on_failed", "GenerationMismatch", "Released does not name what was granted")

    def _tell(self, method: str, *args: object) -> None:
        thread = self._client.thread
        thread.tell_leader(getattr(thread.rooms, method), self._sequence, *args)
