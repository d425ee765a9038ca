"""`sluice.v1.Engine` on the leader's loop: Hello, Generate, Attach, Load, Drain."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import msgspec
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from sluice_engine.leader.inspect import inspect
from sluice_engine.leader.leader import Leader
from sluice_engine.leader.publish import merge_batches
from sluice_protocol.codec import (
    MalformedMessage,
    decode_generate_request,
    encode_drained,
    encode_engine_hello,
    encode_generate_reply,
    encode_load,
    encode_token_batch,
)
from sluice_protocol.engine_spec import EngineSpec
from sluice_protocol.generate import SCHEMA_VERSION, EngineHello, Refused, TokenBatch
from sluice_protocol.v1 import engine_pb2, engine_pb2_grpc
from sluice_runtime.address import join
from sluice_runtime.rpc.keyed_server import build_server
from sluice_runtime.tls.keeper import IdentityKeeper
from sluice_runtime.tls.server import bind

# Steps' worth of tokens that a gateway may be behind before its stream is ended.
MAX_BEHIND = 4096
# After a message nothing is written to that gateway for so long per stream in it, LEAST at least and MOST at most: what
# it and its clients pay for a message is paid per stream. Steps that follow each other faster travel together
# (docs/adr/0097). LEAST is a timer's resolution.
PACE_S, LEAST_PAUSE_S, MOST_PAUSE_S = 200e-6, 1e-3, 15e-3


class TokenSink:
    """Batches between the step loop, which never waits, and one gateway's Attach stream."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._batches: deque[TokenBatch] = deque()
        self._ready = asyncio.Event()
        self._free_at = 0.0
        self.overflowed = False

    def put(self, batch: TokenBatch) -> None:
        if len(self._batches) >= MAX_BEHIND:
            self.overflowed = True
        else:
            self._batches.append(batch)
        self._ready.set()

    async def get(self) -> TokenBatch:
        """All that waits, as one batch: a gateway that is behind gets fewer, larger messages."""
        while not self._batches:
            if self.overflowed:
                raise OverflowError
            self._ready.clear()
            await self._ready.wait()
        if (pause := self._free_at - self._clock()) > 0:
            await asyncio.sleep(pause)
        batches = tuple(self._batches)
        self._batches.clear()
        merged = merge_batches(batches)
        self._free_at = self._clock() + min(max(PACE_S * len(merged.streams), LEAST_PAUSE_S), MOST_PAUSE_S)
        return merged


# A gateway names fewer; what is beyond is not looked after.
MOST_SOURCES = 64


class EngineService(engine_pb2_grpc.EngineServicer):
    def __init__(self, leader: Leader, hello: Callable[[], EngineHello]) -> None:
        self._leader = leader
        self._hello = hello

    async def Hello(self, request: engine_pb2.EngineHelloRequest, context: Any) -> engine_pb2.EngineHelloReply:
        if request.schema_version != SCHEMA_VERSION:
            detail = f"schema_version is {request.schema_version}, this engine speaks {SCHEMA_VERSION}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, detail)
        return encode_engine_hello(self._hello())

    async def Load(self, request: engine_pb2.LoadRequest, context: Any) -> engine_pb2.LoadReply:
        if request.sources:
            self._leader.readers.look_after(request.sources[:MOST_SOURCES])
        return encode_load(self._leader.load())

    async def Drain(self, request: engine_pb2.DrainRequest, context: Any) -> engine_pb2.DrainReply:
        return encode_drained(self._leader.drain())

    async def Inspect(self, request: engine_pb2.InspectRequest, context: Any) -> engine_pb2.InspectReply:
        return engine_pb2.InspectReply(json=msgspec.json.encode(inspect(self._leader)))

    async def Generate(self, request: engine_pb2.GenerateRequest, context: Any) -> engine_pb2.GenerateReply:
        try:
            value = decode_generate_request(request)
        except MalformedMessage as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise AssertionError("abort returned") from error
        answer = self._leader.submit(value)
        if isinstance(answer, Refused):
            return encode_generate_reply(answer)
        try:
            return encode_generate_reply(await answer.wait())
        finally:
            self._leader.abandon(answer)

    async def Attach(self, request: engine_pb2.AttachRequest, context: Any) -> AsyncIterator[engine_pb2.TokenBatch]:
        sink = TokenSink()
        self._leader.attach(request.gateway_id, sink.put)
        try:
            # An empty batch first: the gateway knows that its tokens have a way.
            yield engine_pb2.TokenBatch()
            while True:
                yield encode_token_batch(await sink.get())
        except OverflowError:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"the gateway is {MAX_BEHIND} steps behind")
        finally:
            self._leader.detach(request.gateway_id, sink.put)


async def start_engine_server(
    leader: Leader,
    hello: Callable[[], EngineHello],
    health: HealthServicer,
    spec: EngineSpec,
    identity: IdentityKeeper | None = None,
) -> tuple[grpc.aio.Server, str]:
    """(server, address). Raises RuntimeError when the port is taken."""
    server = build_server(spec.key, identity)
    engine_pb2_grpc.add_EngineServicer_to_server(EngineService(leader, hello), server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    port = bind(server, join(spec.host, spec.ports.engine), identity)
    await server.start()
    return server, join(spec.host, port)
