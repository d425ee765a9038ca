"""The leader's end: the same few verbs over a sidecar's socket and over a puller in this process. asyncio, no grpc.

`on_event` is called on the loop, in order, with every `PullEvent`. `closed` is done exactly once, with the reason: from
then on nothing can land any more, whatever was in flight is terminal, and nothing is stranded (a sidecar's socket is
closed by its death only; a local link has no writes of its own that outlive it).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeVar

from sluice_engine.step import PullSet
from sluice_engine.transfer.errors import BadPeer, LinkClosed, PeerLost, TransferError, TransferUnavailable
from sluice_engine.transfer.messages import (
    Allow,
    AskStats,
    Attach,
    Attached,
    Command,
    Detach,
    Forget,
    FrameReader,
    Ping,
    Pull,
    PullEvent,
    Report,
    SidecarHello,
    Stats,
    Stop,
    Ticked,
    decode_report,
    encode_frame,
)
from sluice_engine.wire import FrameError
from sluice_protocol.source import RecordBytes, SourceHello

T = TypeVar("T")
OnEvent = Callable[[PullEvent], None]
_RECEIVE = 1 << 18
_RETRY_S = 0.02
FORGET_S = 0.05


class TransferLink(Protocol):
    """What the leader holds. All but `attach`, `stats` and `close` return at once."""

    hello: SidecarHello
    closed: asyncio.Future[str]

    async def attach(self, source: SourceHello) -> None:
        """Raises BadPeer, PeerLost, LinkClosed."""
        ...

    def detach(self, peer: str) -> None: ...

    def pull(self, pulls: PullSet) -> None:
        """More records for a lease; `RecordsDone` or `PullFailed` follows."""
        ...

    def stop(self, lease_id: str) -> None:
        """`PullsTerminal` follows, once a lease."""
        ...

    def forget(self, lease_id: str) -> None:
        """After the commit, or after `PullsTerminal`: the lease's id means nothing any more."""
        ...

    def feed(self, lease_id: str, data: RecordBytes) -> None:
        """Byte stream only. Raises BadPeer for bytes that were not asked for, TransferUnavailable elsewhere."""
        ...

    def stream_ended(self, lease_id: str) -> None:
        """The lease's stream is gone: no bytes come any more. Nothing to do where records do not come by it."""
        ...

    def ping(self, peer: str) -> None:
        """Try the lane to a source; `Pinged` follows."""
        ...

    async def stats(self) -> Stats: ...

    async def close(self) -> None: ...


class SidecarLink:
    """Over the sidecar's Unix socket."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: SidecarHello, frames: FrameReader
    ) -> None:
        """Use `connect`."""
        self.hello = hello
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.on_event: OnEvent = _ignore
        self.ticked: Ticked | None = None
        self.ticked_at = time.monotonic()
        self._reader, self._writer, self._frames = reader, writer, frames
        self._attaching: dict[str, deque[asyncio.Future[Attached]]] = {}
        self._asking: deque[asyncio.Future[Stats]] = deque()
        self._unsent = bytearray()
        self._flushing: asyncio.TimerHandle | None = None
        self._receiving = asyncio.create_task(self._receive(), name="sluice-sidecar-link")

    @staticmethod
    async def connect(path: Path, on_event: OnEvent, *, timeout_s: float = 10.0) -> SidecarLink:
        """Wait for the sidecar to listen there, and for its hello. Raises TransferUnavailable."""
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer, frames, first = await _first_frame(path)
        except TimeoutError as error:
            raise TransferUnavailable(f"no sidecar at {path} after {timeout_s} s") from error
        try:
            hello = decode_report(first)
        except FrameError as error:
            raise TransferUnavailable(f"no sidecar at {path}: {error}") from error
        if not isinstance(hello, SidecarHello):
            raise TransferUnavailable(f"the sidecar at {path} began with {type(hello).__name__}")
        link = SidecarLink(reader, writer, hello, frames)
        link.on_event = on_event
        return link

    async def attach(self, source: SourceHello) -> None:
        waiting: asyncio.Future[Attached] = asyncio.get_running_loop().create_future()
        self._attaching.setdefault(source.incarnation, deque()).append(waiting)
        self._send(Attach(source))
        raise_refusal(await waiting)

    def detach(self, peer: str) -> None:
        self._send(Detach(peer))

    def pull(self, pulls: PullSet) -> None:
        self._send(Pull(pulls))

    def stop(self, lease_id: str) -> None:
        self._send(Stop(lease_id))

    def forget(self, lease_id: str) -> None:
        """Sent with the next command, or alone after FORGET_S: nothing waits for it, and a wake-up costs more."""
        self._check_open()
        self._unsent += encode_frame(Forget(lease_id))
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(FORGET_S, self._flush)

    def feed(self, lease_id: str, data: RecordBytes) -> None:
        raise TransferUnavailable(f"records do not come by the lease's stream here (lease {lease_id!r})")

    def stream_ended(self, lease_id: str) -> None:
        pass

    def ping(self, peer: str) -> None:
        self._send(Ping(peer))

    def allow(self, pieces: int) -> None:
        """Tests only."""
        self._send(Allow(pieces))

    async def stats(self) -> Stats:
        waiting: asyncio.Future[Stats] = asyncio.get_running_loop().create_future()
        self._asking.append(waiting)
        self._send(AskStats())
        return await waiting

    async def close(self) -> None:
        """Hang up. A sidecar that was asked for pulls ends by it."""
        self._writer.close()
        await self._receiving

    # -- inside ----------------------------------------------------------------------------------------------------

    def _send(self, command: Command) -> None:
        self._check_open()
        self._unsent += encode_frame(command)
        self._flush()

    def _check_open(self) -> None:
        if self.closed.done():
            raise LinkClosed(self.closed.result())

    def _flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        self._writer.write(bytes(self._unsent))
        self._unsent.clear()

    async def _receive(self) -> None:
        reason = "the sidecar closed the socket"
        try:
            while data := await self._reader.read(_RECEIVE):
                for body in self._frames.feed(data):
                    self._take(decode_report(body))
        except Exception as error:
            # Not only the socket's: whatever goes wrong here, this link is of no use any more, and says so.
            reason = f"{type(error).__name__}: {error}"
        finally:
            self._writer.close()
            self._end(reason)

    def _take(self, report: Report) -> None:
        match report:
            case Attached(peer):
                _answer(self._attaching[peer], report)
            case Stats():
                _answer(self._asking, report)
            case Ticked():
                self.ticked, self.ticked_at = report, time.monotonic()
            case SidecarHello():
                raise FrameError("a second hello")
            case event:
                self.on_event(event)

    def _end(self, reason: str) -> None:
        self.closed.set_result(reason)
        if self._flushing is not None:
            self._flushing.cancel()
        error = LinkClosed(reason)
        waiting: list[asyncio.Future[Any]] = [*chain(*self._attaching.values()), *self._asking]
        for future in waiting:
            if not future.done():
                future.set_exception(error)


def _answer(waiting: deque[asyncio.Future[T]], report: T) -> None:
    """Answer the oldest request, which may have been given up."""
    future = waiting.popleft()
    if not future.done():
        future.set_result(report)


def raise_refusal(attached: Attached) -> None:
    """Turn a refused Attach into the error that it names."""
    kinds: dict[str, type[TransferError]] = {"BadPeer": BadPeer, "PeerLost": PeerLost}
    if attached.reason:
        raise kinds.get(attached.reason, TransferError)(attached.detail)


def _ignore(event: PullEvent) -> None:
    pass


async def _first_frame(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, FrameReader, bytes]:
    """Connect and read until a whole frame is there.

    While nothing listens, or a connection ends before its first frame, a sidecar is not there yet or is just dying: the
    next one will listen at the same place.
    """
    while True:
        writer = None
        try:
            reader, writer = await asyncio.open_unix_connection(path)
            frames = FrameReader()
            while data := await reader.read(_RECEIVE):
                if bodies := frames.feed(data):
                    return reader, writer, frames, bodies[0]
        except (OSError, FrameError):
            pass
        if writer is not None:
            writer.close()
        await asyncio.sleep(_RETRY_S)
