"""An engine over gRPC. The only file of the gateway that knows gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import grpc

from sluice_gateway.routing.engine import EngineClient, EngineLost
from sluice_gateway.routing.fleet import Member
from sluice_protocol import codec
from sluice_protocol.generate import (
    MAX_MESSAGE_BYTES,
    SCHEMA_VERSION,
    EngineHello,
    GenerateReply,
    GenerateRequest,
    Load,
    TokenBatch,
)
from sluice_protocol.v1 import engine_pb2 as pb
from sluice_protocol.v1.engine_pb2_grpc import EngineStub
from sluice_runtime.rpc.options import KEY_HEADER, RECONNECT
from sluice_runtime.tls.client import Lines, open_channel
from sluice_runtime.tls.diagnosis import why_not
from sluice_runtime.tls.identity import Identity
from sluice_runtime.tls.keeper import IdentityKeeper
from sluice_runtime.tls.peers import Peer

INLINE_IDS = 16_384
"""A request with more token ids is encoded off the event loop; this many take half a millisecond."""
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    *RECONNECT,
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]


class GrpcEngine:
    """The way to one engine. `key` authenticates the gateway, and so does its certificate if it has one: then the
    engine has to be `peer` by its own. `timeout_s` bounds Hello and Load."""

    def __init__(
        self,
        address: str,
        key: str,
        timeout_s: float = 5.0,
        identity: IdentityKeeper | None = None,
        peer: Peer = Peer.DECODE,
    ) -> None:
        self._address, self._peer = address, peer
        self._timeout_s = timeout_s
        self._metadata = ((KEY_HEADER, key),)
        self._identity = identity
        self._lines = Lines(
            lambda shown: open_channel(address, peer, shown, _OPTIONS), cast(Any, EngineStub), self._current
        )

    def _current(self) -> Identity | None:
        return None if self._identity is None else self._identity.current

    async def hello(self) -> EngineHello:
        message = await self._unary("Hello", pb.EngineHelloRequest(schema_version=SCHEMA_VERSION))
        try:
            hello = codec.decode_engine_hello(message)
        except codec.MalformedMessage as error:
            raise EngineLost(f"{self._address}: {error}") from error
        if hello.schema_version != SCHEMA_VERSION:
            raise EngineLost(f"{self._address}: schema version {hello.schema_version}, not {SCHEMA_VERSION}")
        return hello

    async def load(self, sources: tuple[str, ...] = ()) -> Load:
        return codec.decode_load(await self._unary("Load", pb.LoadRequest(sources=sources)))

    async def _unary(self, method: str, request: Any) -> Any:
        try:
            return await self._lines.call(method, request, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise await self._why(error) from error
        except asyncio.CancelledError as error:
            raise _unless_cancelled(self._address) from error

    async def attach(self, gateway_id: str) -> AsyncIterator[TokenBatch]:
        call = self._lines.call("Attach", pb.AttachRequest(gateway_id=gateway_id), metadata=self._metadata)
        try:
            async for message in call:
                yield codec.decode_token_batch(message)
        except grpc.aio.AioRpcError as error:
            raise self._lost(error) from error
        except codec.MalformedMessage as error:
            raise EngineLost(f"{self._address}: {error}") from error
        except asyncio.CancelledError as error:
            raise _unless_cancelled(self._address) from error
        finally:
            call.cancel()
        raise EngineLost(f"{self._address}: the engine ended the Attach stream")

    def generate(self, request: GenerateRequest) -> GrpcGenerate:
        start = partial(self._lines.call, "Generate", metadata=self._metadata)
        if len(request.prompt_ids) + len(request.sampling.logit_bias) > INLINE_IDS:
            return GrpcGenerate(start, self._address, large=request)
        return GrpcGenerate(start, self._address, codec.encode_generate_request(request))

    async def close(self) -> None:
        await self._lines.close()

    async def _why(self, error: grpc.aio.AioRpcError) -> EngineLost:
        """With TLS's own reason where that is what is wrong."""
        is_connection = error.code() is grpc.StatusCode.UNAVAILABLE
        if is_connection and (why := await why_not(self._address, self._peer, self._current())):
            return EngineLost(f"{self._address}: TLS: {why}")
        return self._lost(error)

    def _lost(self, error: grpc.aio.AioRpcError) -> EngineLost:
        return EngineLost(f"{self._address}: {error.code().name}: {error.details()}")


class GrpcGenerate:
    """`large`: a request that is not encoded yet, because that takes too long for the event loop."""

    def __init__(
        self, start: Callable[[Any], Any], address: str, message: Any = None, large: GenerateRequest | None = None
    ) -> None:
        self._start = start
        self._large = large
        self._call = None if message is None else start(message)
        self._address = address
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True
        if self._call is not None:
            self._call.cancel()

    async def reply(self) -> GenerateReply | None:
        """gRPC reports a cancel of ours as CancelledError in the task that waits."""
        if self._large is not None:
            message = await asyncio.to_thread(encode_in_slices, self._large)
            if self._cancelled:
                return None
            self._call = self._start(message)
        assert self._call is not None
        try:
            return codec.decode_generate_reply(await self._call)
        except grpc.aio.AioRpcError as error:
            raise EngineLost(f"{self._address}: {error.code().name}: {error.details()}") from error
        except codec.MalformedMessage as error:
            raise EngineLost(f"{self._address}: {error}") from error
        except asyncio.CancelledError as error:
            lost = _unless_cancelled(self._address)
            if not self._cancelled:
                raise lost from error
            return None
        finally:
            self._call.cancel()


def encode_in_slices(request: GenerateRequest) -> Any:
    """`codec.encode_generate_request`, without keeping other threads from the interpreter for 25 ms per million ids."""
    message = codec.encode_generate_request(replace(request, prompt_ids=()))
    for start in range(0, len(request.prompt_ids), INLINE_IDS):
        message.prompt_ids.extend(request.prompt_ids[start : start + INLINE_IDS])
    return message


def _unless_cancelled(address: str) -> EngineLost:
    """For use in `except CancelledError`: re-raises it if this task was cancelled.

    gRPC also raises it when a call ended with status CANCELLED, which is what a server that stops sends.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
    return EngineLost(f"{address}: CANCELLED")


def grpc_factory(member: Member, key: str, identity: IdentityKeeper | None = None) -> EngineClient:
    peer = Peer.ENGINE if member.role is None else Peer(member.role)
    return GrpcEngine(member.address, key, identity=identity, peer=peer)
