"""A reader's connections to its sources: one channel and one Hello per source and life. On the lease loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from sluice_engine.leader.lease.thread import LeaseThread
from sluice_engine.leader.lease.watch import BadSource
from sluice_protocol.codec import decode_source_hello
from sluice_protocol.fingerprint import Fingerprint
from sluice_protocol.generate import SCHEMA_VERSION
from sluice_protocol.source import SourceHello
from sluice_protocol.v1 import source_pb2, source_pb2_grpc
from sluice_runtime.rpc.options import KEY_HEADER, OPTIONS
from sluice_runtime.tls.client import open_channel
from sluice_runtime.tls.diagnosis import why_not
from sluice_runtime.tls.identity import Identity
from sluice_runtime.tls.keeper import IdentityKeeper
from sluice_runtime.tls.peers import Peer

HELLO_TIMEOUT_S = 10.0


@dataclass(slots=True)
class Connection:
    """One life of one source. `users` use its channel; `stale`: the next user says Hello on a new one. `identity`: our
    own, as it was shown to the source."""

    identity: Identity | None
    channel: grpc.aio.Channel
    stub: Any
    hello: asyncio.Task[SourceHello]
    users: int = 0
    stale: bool = False


class Connections:
    """`attach` (on the leader's loop) shows the transport a new source."""

    def __init__(
        self,
        thread: LeaseThread,
        fingerprint: Fingerprint,
        key: str,
        attach: Callable[[SourceHello], None],
        identity: IdentityKeeper | None = None,
    ) -> None:
        self.fingerprint = fingerprint
        self.metadata = ((KEY_HEADER, key),)
        self._thread = thread
        self._attach = attach
        self._identity = identity
        self._by_address: dict[str, Connection] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def enter(self, address: str) -> Connection:
        """The source at `address`, for one user more. Every `enter` is followed by a `leave`."""
        known, identity = self._by_address.get(address), None if self._identity is None else self._identity.current
        if known is not None and known.identity is not identity:
            self._retire(address, known)
            known = None
        if known is None:
            channel = open_channel(address, Peer.PREFILL, identity, OPTIONS)
            stub = source_pb2_grpc.SourceStub(channel)
            hello = asyncio.get_running_loop().create_task(self._hello(address, stub, identity))
            known = self._by_address[address] = Connection(identity, channel, stub, hello)
        known.users += 1
        return known

    def distrust(self, address: str, connection: Connection) -> None:
        """The next user says Hello first. Those that use this channel go on."""
        connection.stale = True
        if self._by_address.get(address) is connection:
            del self._by_address[address]

    async def leave(self, connection: Connection) -> None:
        connection.users -= 1
        if connection.stale and connection.users == 0:
            await self._end(connection)

    def forget_source(self, incarnation: str) -> None:
        """From the leader's loop: the transport would not have it."""
        self._thread.call(self._forget_source, incarnation)

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

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that is kept until it is done."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _retire(self, address: str, connection: Connection) -> None:
        """As `distrust`, from outside of its users: there may be none that leaves last."""
        self.distrust(address, connection)
        if connection.users == 0:
            self.spawn(self._end(connection))

    async def _end(self, connection: Connection) -> None:
        connection.hello.cancel()
        await connection.channel.close(None)

    def _forget_source(self, incarnation: str) -> None:
        for address, connection in list(self._by_address.items()):
            hello = connection.hello
            known = hello.done() and not hello.cancelled() and hello.exception() is None
            if known and hello.result().incarnation == incarnation:
                self._retire(address, connection)

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
        self._thread.tell_leader(self._attach, hello)
        return hello

    async def _call_hello(self, stub: Any, timeout_s: float) -> SourceHello:
        request = source_pb2.SourceHelloRequest(schema_version=SCHEMA_VERSION, fingerprint=self.fingerprint.as_dict())
        return decode_source_hello(await stub.Hello(request, metadata=self.metadata, timeout=timeout_s))
