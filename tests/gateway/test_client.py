"""The gRPC client against a real gRPC server that plays an engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from sluice_gateway.routing.client import GrpcEngine, encode_in_slices
from sluice_gateway.routing.engine import EngineLost
from sluice_gateway.routing.fleet import Engine, Member
from sluice_gateway.routing.link import Link, Timings
from sluice_gateway.routing.session import Lost
from sluice_protocol import codec
from sluice_protocol.fingerprint import Fingerprint
from sluice_protocol.generate import (
    SCHEMA_VERSION,
    Ended,
    EndReason,
    EngineHello,
    GenerateRequest,
    Load,
    Refused,
    Role,
    Route,
    TokenBatch,
)
from sluice_protocol.sampling import Sampling, TokenLogprobs
from sluice_protocol.v1 import engine_pb2 as pb
from sluice_protocol.v1.engine_pb2_grpc import EngineServicer, add_EngineServicer_to_server

HELLO = EngineHello(Role.DECODE, Fingerprint.of({"a": "b"}), "i1", 4096, 16, "source:1", 77, 512)
LOAD = Load("i1", 1, 2, 8, 10, 20, 1.5, step_p95_ms=3.5, block_keys=(b"k" * 16,))
REQUEST = GenerateRequest("r", "gw", (1, 2, 3), (4,), Sampling(seed=7, max_tokens=9, top_logprobs=2), "source:1")
SECRET = "key-of-this-run"
QUICK = Timings(load_every_s=0.02, tokens_timeout_s=1.0, first_backoff_s=0.01, most_backoff_s=0.05)


class FakeEngine(EngineServicer):
    """Answers as told: each item of `steps` is something to wait for, or what Generate answers; `batches` are sent."""

    def __init__(self) -> None:
        self.hello: Any = codec.encode_engine_hello(HELLO)
        self.load: Any = LOAD
        self.steps: list[Any] = []
        self.batches: asyncio.Queue[TokenBatch | pb.TokenBatch | None] = asyncio.Queue()
        self.keys: list[Any] = []
        self.requests: list[GenerateRequest] = []
        self.ended = asyncio.Event()
        self.attached: list[str] = []

    async def _check(self, context: Any) -> None:
        key = dict(context.invocation_metadata()).get("x-sluice-key")
        self.keys.append(key)
        if key != SECRET:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong key")

    async def Hello(self, request: Any, context: Any) -> Any:
        await self._check(context)
        return self.hello

    async def Load(self, request: Any, context: Any) -> Any:
        await self._check(context)
        return codec.encode_load(self.load)

    async def Attach(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await self._check(context)
        self.attached.append(request.gateway_id)
        yield pb.TokenBatch()
        while (batch := await self.batches.get()) is not None:
            yield codec.encode_token_batch(batch) if isinstance(batch, TokenBatch) else batch

    async def Generate(self, request: Any, context: Any) -> Any:
        await self._check(context)
        self.requests.append(codec.decode_generate_request(request))
        try:
            for step in self.steps:
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, grpc.StatusCode):
                    await context.abort(step, "as told")
                else:
                    return step if isinstance(step, pb.GenerateReply) else codec.encode_generate_reply(step)
        finally:
            self.ended.set()


@pytest.fixture
async def engine() -> AsyncIterator[tuple[FakeEngine, str, Any]]:
    """(the fake, its address, the server, which a test may stop)."""
    fake, server = FakeEngine(), grpc.aio.server()
    add_EngineServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield fake, f"127.0.0.1:{port}", server
    await server.stop(None)


@pytest.fixture
async def client(engine: Any) -> AsyncIterator[GrpcEngine]:
    client = GrpcEngine(engine[1], SECRET, timeout_s=10)
    yield client
    await client.close()


async def test_hello_and_load_arrive_whole_and_every_call_carries_the_key(engine: Any, client: GrpcEngine) -> None:
    assert await client.hello() == HELLO
    assert await client.load() == LOAD
    engine[0].steps = [Refused("X", "y")]
    assert await client.generate(REQUEST).reply() == Refused("X", "y")
    engine[0].batches.put_nowait(None)
    with pytest.raises(EngineLost):
        async for _ in client.attach("gw"):
            pass
    assert engine[0].keys == [SECRET] * 4
    assert engine[0].requests == [REQUEST]
    assert engine[0].attached == ["gw"]


async def test_a_wrong_key_is_an_engine_that_is_lost(engine: Any) -> None:
    client = GrpcEngine(engine[1], "guess", timeout_s=10)
    for call in (client.hello, client.load):
        with pytest.raises(EngineLost, match="UNAUTHENTICATED"):
            await call()
    with pytest.raises(EngineLost, match="UNAUTHENTICATED"):
        await client.generate(REQUEST).reply()
    await client.close()


async def test_the_end_arrives_whole(engine: Any, client: GrpcEngine) -> None:
    ended = Ended(EndReason.STOP, 3, 2, route=Route(1, 2, 3, 4, "nixl", 5))
    engine[0].steps = [ended]
    assert await client.generate(REQUEST).reply() == ended


async def test_cancel_ends_the_work_and_there_is_no_reply(engine: Any, client: GrpcEngine) -> None:
    engine[0].steps = [asyncio.Event()]
    call = client.generate(REQUEST)
    waiting = asyncio.create_task(call.reply())
    await until(lambda: bool(engine[0].requests))
    call.cancel()
    call.cancel()
    assert await asyncio.wait_for(waiting, 10) is None
    await asyncio.wait_for(engine[0].ended.wait(), 10)


async def test_a_cancelled_task_ends_the_work_and_stays_cancelled(engine: Any, client: GrpcEngine) -> None:
    engine[0].steps = [asyncio.Event()]
    task = asyncio.create_task(client.generate(REQUEST).reply())
    await until(lambda: bool(engine[0].requests))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(engine[0].ended.wait(), 10)


async def test_an_aborted_call_is_an_engine_that_is_lost(engine: Any, client: GrpcEngine) -> None:
    engine[0].steps = [grpc.StatusCode.INTERNAL]
    with pytest.raises(EngineLost, match="INTERNAL: as told"):
        await client.generate(REQUEST).reply()


async def test_messages_of_unknown_kind_are_an_engine_that_is_lost(engine: Any, client: GrpcEngine) -> None:
    engine[0].steps = [pb.GenerateReply()]
    with pytest.raises(EngineLost, match="unknown kind"):
        await client.generate(REQUEST).reply()
    engine[0].batches.put_nowait(pb.TokenBatch(streams=[1], counts=[2], tokens=[3]))
    with pytest.raises(EngineLost, match="add up"):
        async for _ in client.attach("gw"):
            pass


async def test_another_schema_version_or_role_is_refused(engine: Any, client: GrpcEngine) -> None:
    engine[0].hello = pb.EngineHelloReply(schema_version=99, role="decode")
    with pytest.raises(EngineLost, match="schema version 99"):
        await client.hello()
    engine[0].hello = pb.EngineHelloReply(schema_version=SCHEMA_VERSION, role="chef")
    with pytest.raises(EngineLost, match="chef"):
        await client.hello()


async def test_an_address_where_nobody_listens_fails_at_once(engine: Any) -> None:
    await engine[2].stop(None)
    client = GrpcEngine(engine[1], SECRET, timeout_s=30)
    async with asyncio.timeout(10):
        with pytest.raises(EngineLost, match="UNAVAILABLE"):
            await client.hello()
        with pytest.raises(EngineLost):
            async for _ in client.attach("gw"):
                pass
    await client.close()


async def test_a_million_prompt_tokens_pass(engine: Any, client: GrpcEngine) -> None:
    engine[0].steps = [Ended(EndReason.STOP, 0)]
    request = GenerateRequest("r", "gw", tuple(range(1, 1_000_001)), (), Sampling())
    assert await client.generate(request).reply() == Ended(EndReason.STOP, 0)
    assert engine[0].requests[0].prompt_ids == request.prompt_ids


# -- the link over the real wire


async def test_a_long_prompt_arrives_whole_and_is_encoded_off_the_loop(engine: Any, client: GrpcEngine) -> None:
    """A million ids took 25 ms of the loop."""
    fake, _, _ = engine
    fake.steps = [Refused("X", "y")]
    request = replace(REQUEST, prompt_ids=tuple(range(100_000)))
    threads: list[threading.Thread] = []
    call = client.generate(request)
    call._start = lambda message, start=call._start: threads.append(threading.current_thread()) or start(message)
    assert not fake.requests
    assert await call.reply() == Refused("X", "y")
    assert [given.prompt_ids for given in fake.requests] == [request.prompt_ids]
    assert threads == [threading.main_thread()], "gRPC's objects belong to the loop"
    assert encode_in_slices(request) == codec.encode_generate_request(request)


async def test_one_that_nobody_waits_for_any_more_is_not_sent(engine: Any, client: GrpcEngine) -> None:
    call = client.generate(replace(REQUEST, prompt_ids=tuple(range(100_000))))
    call.cancel()
    assert await call.reply() is None
    assert not engine[0].requests


@pytest.fixture
async def link(engine: Any) -> AsyncIterator[Link]:
    member = Member(Role.DECODE, engine[1])
    link = Link(member, lambda member: GrpcEngine(member.address, SECRET, 10), "gw", lambda: None, QUICK)
    running = asyncio.create_task(link.run())
    await until(lambda: not link.view.unusable)
    yield link
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the condition is read from a real server
            await asyncio.sleep(0.005)


def collector(tokens: list[int], enough: int = 10**9) -> Any:
    def push(row: Any, _logprobs: Any) -> bool:
        tokens.extend(row)
        return len(tokens) >= enough

    return push


async def test_the_link_shows_what_the_engine_says(engine: Any, link: Link) -> None:
    assert link.view == Engine(Member(Role.DECODE, engine[1]), HELLO, LOAD)


async def stream_of(engine: FakeEngine, request: int = 0) -> int:
    """The number that the link chose for the nth request."""
    await until(lambda: len(engine.requests) > request)
    return engine.requests[request].stream


async def test_tokens_may_come_after_the_end(engine: Any, link: Link) -> None:
    """The streams race: whoever ended waits for his last token. What is nobody's is dropped."""
    go = asyncio.Event()
    engine[0].steps = [go, Ended(EndReason.LENGTH, 4)]
    tokens: list[int] = []
    first: list[int] = []
    task = asyncio.create_task(link.attempt(REQUEST, collector(tokens), lambda: first.append(1)))
    mine = await stream_of(engine[0])
    engine[0].batches.put_nowait(TokenBatch(1, (mine, mine + 1), (2, 1), (10, 11, 99)))
    await until(lambda: tokens == [10, 11])
    go.set()
    await asyncio.wait_for(engine[0].ended.wait(), 10)
    assert not task.done()
    engine[0].batches.put_nowait(TokenBatch(2, (mine,), (2,), (12, 13), ((1, TokenLogprobs(-1.0)),)))
    assert await task == Ended(EndReason.LENGTH, 4)
    assert tokens == [10, 11, 12, 13]
    assert first == [1]


async def test_tries_that_run_have_streams_of_their_own(engine: Any, link: Link) -> None:
    engine[0].steps = [asyncio.Event()]
    tasks = [asyncio.create_task(link.attempt(REQUEST, collector([]), lambda: None)) for _ in range(3)]
    await until(lambda: len(engine[0].requests) == 3)
    assert len({request.stream for request in engine[0].requests}) == 3
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_logprobs_arrive_beside_their_tokens(engine: Any, link: Link) -> None:
    engine[0].steps = [Ended(EndReason.LENGTH, 2)]
    seen: list[Any] = []
    push = collector([])
    task = asyncio.create_task(
        link.attempt(REQUEST, lambda row, told: bool(seen.append((tuple(row), told))) or push(row, told), lambda: None)
    )
    mine = await stream_of(engine[0])
    engine[0].batches.put_nowait(
        TokenBatch(1, (mine + 1, mine), (1, 2), (9, 10, 11), ((2, TokenLogprobs(-1.5, (11,), (-1.5,))),))
    )
    await task
    assert seen == [((10, 11), [None, TokenLogprobs(-1.5, (11,), (-1.5,))])]


async def test_tokens_that_never_come_fail_the_try(engine: Any, link: Link) -> None:
    engine[0].steps = [Ended(EndReason.LENGTH, 4)]
    result = await link.attempt(REQUEST, collector([]), lambda: None)
    assert isinstance(result, Lost)
    assert result.reason == "TokensLost"


async def test_a_sink_that_has_enough_ends_the_call(engine: Any, link: Link) -> None:
    engine[0].steps = [asyncio.Event()]
    task = asyncio.create_task(link.attempt(REQUEST, collector([], enough=2), lambda: None))
    engine[0].batches.put_nowait(TokenBatch(1, (await stream_of(engine[0]),), (3,), (1, 2, 3)))
    assert isinstance(await task, Lost)
    await asyncio.wait_for(engine[0].ended.wait(), 10)


async def test_a_sink_that_raises_ends_its_own_try_only(engine: Any, link: Link) -> None:
    def broken(_row: Any, _logprobs: Any) -> bool:
        raise ValueError("a defect")

    engine[0].steps = [asyncio.Event()]
    task = asyncio.create_task(link.attempt(REQUEST, broken, lambda: None))
    engine[0].batches.put_nowait(TokenBatch(1, (await stream_of(engine[0]),), (1,), (1,)))
    result = await task
    assert isinstance(result, Lost)
    assert "a defect" in result.detail
    engine[0].steps = [Ended(EndReason.STOP, 1)]
    tokens: list[int] = []
    task = asyncio.create_task(link.attempt(REQUEST, collector(tokens), lambda: None))
    engine[0].batches.put_nowait(TokenBatch(2, (await stream_of(engine[0], 1),), (1,), (7,)))
    assert await task == Ended(EndReason.STOP, 1)
    assert tokens == [7]


@pytest.mark.parametrize("how", ["attach", "incarnation", "stop"])
async def test_a_lost_engine_fails_its_tries_and_is_found_again(engine: Any, link: Link, how: str) -> None:
    engine[0].steps = [asyncio.Event()]
    task = asyncio.create_task(link.attempt(REQUEST, collector([]), lambda: None))
    await until(lambda: bool(engine[0].requests))
    if how == "attach":
        engine[0].batches.put_nowait(None)
    elif how == "incarnation":
        engine[0].load = Load("i2", 0, 0, 8, 1, 1)
    else:
        await engine[2].stop(None)
    result = await asyncio.wait_for(task, 20)
    assert isinstance(result, Lost)
    assert result.reason == "EngineLost"
    if how == "stop":
        await until(lambda: link.view.hello is None)
        assert link.view.unusable
        return
    if how == "incarnation":
        engine[0].hello.incarnation = "i2"
    await until(lambda: len(engine[0].attached) >= 2 and not link.view.unusable)


async def test_own_tries_count_until_load_knows_of_them(engine: Any, link: Link) -> None:
    epoch = link.begin()
    room = link.view.room
    assert room == 8 - 3 - 1
    await until(lambda: link.view.own == 0)
    link.end(epoch)
    assert link.view.own == -1
    await until(lambda: link.view.own == 0)
    link.end(epoch - 1)
    assert link.view.own == 0
