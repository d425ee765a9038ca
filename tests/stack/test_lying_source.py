"""A source that lies, a lease that ends alone, transports that die under load: every room is answered or fails by name,
within seconds, and the books are exact after it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from queue import Queue
from threading import Event

import grpc
import psutil
import pytest
from lying_source import METADATA, BareGateway, Lie, LyingSource, open_message
from stack_double import EngineProcess, RunningStack

from sluice_launch.process import eventually
from sluice_protocol.v1 import engine_pb2, source_pb2, source_pb2_grpc

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[RunningStack, LyingSource, str, BareGateway]]:
    with ExitStack() as exits:
        stack = exits.enter_context(RunningStack(spec={"max_running": 8, "chunk_tokens": 16}))
        prefill, decode = stack.start("prefill", "decode")
        source = LyingSource(prefill)
        address = exits.enter_context(source.serving())
        gateway = exits.enter_context(BareGateway(decode))
        yield stack, source, address, gateway


def records(change: Callable[[source_pb2.GrantedRecord], None]) -> Lie:
    def lie(message: source_pb2.SourceMessage) -> list[source_pb2.SourceMessage]:
        for record in message.granted.records:
            change(record)
        return [message]

    return lie


def on(kind: str, change: Callable[[source_pb2.SourceMessage], list[source_pb2.SourceMessage]]) -> Lie:
    return lambda message: change(message) if message.WhichOneof("kind") == kind else [message]


def setting(kind: str, field: str, value: object) -> Lie:
    def change(message: source_pb2.SourceMessage) -> list[source_pb2.SourceMessage]:
        setattr(getattr(message, kind), field, value)
        return [message]

    return on(kind, change)


LIES: dict[str, tuple[Lie, set[str]]] = {
    "no first token": (on("first_token", lambda message: []), {"BadSource"}),
    "a token beyond the vocabulary": (setting("first_token", "token", 10**9), {"BadSource"}),
    "fewer records said": (setting("complete", "num_records", 1), {"BadSource"}),
    "more records said": (setting("complete", "num_records", 99), {"BadSource"}),
    "a grant withheld": (on("granted", lambda message: []), {"BadSource"}),
    "a grant twice": (on("granted", lambda message: [message, message]), {"BadSource", "RoomFailed"}),
    "an index out of range": (records(lambda r: setattr(r, "index", 5000)), {"BadSource"}),
    "a kind of tomorrow": (records(lambda r: setattr(r, "kind", "dream")), {"BadSource"}),
    "another record": (records(lambda r: setattr(r, "record", (r.record + 3) % 8)), set()),
    "a record out of range": (records(lambda r: setattr(r, "record", 10**8)), set()),
    "another generation": (records(lambda r: setattr(r, "generation", r.generation + 1)), set()),
    "another identity": (records(lambda r: setattr(r, "identity", b"x" * 16)), {"BadSource"}),
    "another digest": (records(lambda r: setattr(r, "digest", r.digest ^ 1)), set()),
    "other valid tokens": (records(lambda r: setattr(r, "valid_tokens", 7)), {"BadSource"}),
    "released twice": (on("released", lambda message: [message, message]), {""}),
    "nothing released": (on("released", lambda m: [source_pb2.SourceMessage(released=source_pb2.Released())]), set()),
    "an unknown kind": (on("granted", lambda message: [source_pb2.SourceMessage()]), {"UnknownMessage"}),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_fails_its_room_by_name_and_nothing_else(pair, name):
    stack, source, address, gateway = pair
    lie, reasons = LIES[name]
    prompt = [len(name), *range(1, 60)]
    source.lie = lie
    try:
        ended = gateway.generate(address, prompt)
    finally:
        source.lie = lambda message: [message]
    if reasons == {""}:
        assert ended.reason == "length"
    else:
        assert ended.reason == "failed", ended
        assert ended.error
        assert not reasons or ended.error in reasons, ended
    served = gateway.generate(address, [*prompt, 1])
    assert (served.reason, served.num_tokens) == ("length", 6)
    for engine in stack.engines.values():
        engine.settled()


def test_a_readers_mismatch_reaches_the_source_which_verifies_its_own_records(pair):
    """They are good there, so the lane is at fault: that is counted, and nothing is thrown away."""
    stack, source, address, gateway = pair
    prefill = stack.engines["prefill-0"]
    before = prefill.inspect()["counters"]
    source.lie = records(lambda r: setattr(r, "digest", r.digest ^ 1))
    try:
        ended = gateway.generate(address, [11, *range(1, 60)])
    finally:
        source.lie = lambda message: [message]
    assert (ended.reason, ended.error) == ("failed", "DigestMismatch")

    def grown(name: str) -> int:
        return int(prefill.inspect()["counters"].get(name, 0)) - int(before.get(name, 0))

    eventually(lambda: grown("lane_mismatches") > 0, "the source has verified what the reader complained of")
    assert grown("mismatches_reported") == 1
    assert grown("records_corrupt") == 0
    for engine in stack.engines.values():
        engine.settled()


@pytest.mark.parametrize("kind", ["admitted", "released"])
def test_a_source_that_says_nothing_where_it_must_answer_is_not_waited_for(pair, kind):
    """Its stream stays open: nothing but the reader's own patience ends this room."""
    stack, source, address, gateway = pair
    over = Event()

    def fall_silent(message: source_pb2.SourceMessage) -> list[source_pb2.SourceMessage]:
        over.wait(60)
        return []

    source.lie = on(kind, fall_silent)
    try:
        ended = gateway.generate(address, [len(kind), *range(7, 70)], timeout=45)
    finally:
        source.lie = lambda message: [message]
        over.set()
    assert (ended.reason, ended.error) == ("failed", "SourceSilent"), ended
    served = gateway.generate(address, [3, *range(7, 70)])
    assert (served.reason, served.num_tokens) == ("length", 6)
    for engine in stack.engines.values():
        engine.settled()


COMPUTED = ("granted", "first_token", "complete")


def test_a_source_that_has_lost_a_room_is_not_waited_for():
    """It admits, and says nothing more; the stream stays open. Both engines were idle and ready, for an hour."""
    with ExitStack() as exits:
        health = {"floor_s": 3.0}
        stack = exits.enter_context(RunningStack(spec={"max_running": 8, "chunk_tokens": 16, "health": health}))
        prefill, decode = stack.start("prefill", "decode")
        source = LyingSource(prefill)
        address = exits.enter_context(source.serving())
        gateway = exits.enter_context(BareGateway(decode))
        source.lie = lambda message: [] if message.WhichOneof("kind") in COMPUTED else [message]
        ended = gateway.generate(address, [5, *range(7, 70)], timeout=60)
        # The reader's patience is over, or the real source's with a lease that is complete and that nobody pulls.
        assert ended.reason == "failed", ended
        assert ended.error in ("SourceSilent", "SourceLost"), ended
        source.lie = lambda message: [message]
        served = gateway.generate(address, [3, *range(7, 70)])
        assert (served.reason, served.num_tokens) == ("length", 6)
        for engine in stack.engines.values():
            engine.settled()


def test_a_room_whose_turn_is_long_in_coming_is_waited_for():
    """Four prompts of a chunk each, at 3.5 s a chunk: the last is granted nothing for longer than a source that
    says nothing is believed."""
    slow = {"scripted": {"step_cost_us": 3.5e6}, "max_running": 8, "chunk_tokens": 64, "health": {"floor_s": 5.0}}
    with ExitStack() as exits:
        stack = exits.enter_context(RunningStack(spec=slow))
        prefill, decode = stack.start("prefill", "decode")
        source = LyingSource(prefill)
        address = exits.enter_context(source.serving())
        gateway = exits.enter_context(BareGateway(decode))
        with ThreadPoolExecutor(4) as pool:
            more = {"max_tokens": 2, "timeout": 90}
            asked = [pool.submit(gateway.generate, address, [first, *range(7, 70)], **more) for first in range(4)]
            told = [one.result(100) for one in asked]
        assert [(ended.reason, ended.num_tokens) for ended in told] == [("length", 2)] * 4, told
        for engine in stack.engines.values():
            engine.settled()


def test_one_lease_that_ends_leaves_the_others_alone():
    with ExitStack() as exits:
        stack = exits.enter_context(RunningStack(scripted={"token_cost_us": 1500.0}, spec={"max_running": 6}))
        prefill, decode = stack.start("prefill", "decode")
        source = LyingSource(prefill)
        source.aborts = {4}
        address = exits.enter_context(source.serving())
        gateway = exits.enter_context(BareGateway(decode))
        with ThreadPoolExecutor(4) as pool:
            rooms = [pool.submit(gateway.generate, address, [i] * 800, timeout=60) for i in (1, 2, 3)]
            eventually(lambda: source.leases == 3, "three leases are open")
            alone = gateway.generate(address, [9] * 20)
            assert (alone.reason, alone.error) == ("failed", "SourceLost")
            assert [room.result().reason for room in rooms] == ["length"] * 3
        for engine in stack.engines.values():
            engine.settled()


def test_a_gateway_without_its_attach_stream_gets_nothing_more():
    with RunningStack(scripted={"step_cost_us": 10000.0}) as stack:
        engine = stack.start("unified")[0]
        with grpc.insecure_channel(engine.address) as channel, BareGateway(engine) as gateway:
            attach = gateway.stub.Attach(engine_pb2.AttachRequest(gateway_id="second"), metadata=METADATA)
            next(attach)
            assert engine.inspect()["gateways"] == 2
            request = engine_pb2.GenerateRequest(
                request_id="r",
                gateway_id="second",
                prompt_ids=[1, 2, 3],
                sampling=engine_pb2.Sampling(max_tokens=3000, top_p=1.0, repetition_penalty=1.0),
            )
            reply = gateway.stub.Generate.future(request, metadata=METADATA, timeout=60)
            eventually(lambda: engine.inspect()["streams"] == 1, "it runs")
            attach.cancel()
            ended = reply.result().ended
            assert (ended.reason, ended.error) == ("failed", "AttachLost")
            del channel
        eventually(lambda: engine.inspect()["gateways"] == 0, "both are gone")
        engine.settled()


def test_a_gateway_that_never_attached_is_refused_at_once():
    """Its tokens would have no way: nothing may run for it."""
    with RunningStack() as stack:
        engine = stack.start("unified")[0]
        with BareGateway(engine) as gateway:
            request = engine_pb2.GenerateRequest(
                request_id="r",
                gateway_id="stranger",
                prompt_ids=[1, 2, 3],
                sampling=engine_pb2.Sampling(max_tokens=5, top_p=1.0, repetition_penalty=1.0),
            )
            refused = gateway.stub.Generate(request, metadata=METADATA, timeout=30).refused
            assert refused.reason == "NotAttached"
            assert refused.retry_after_ms > 0
        engine.settled()


def test_a_stream_number_that_is_taken_is_refused():
    """Two requests under one number would get each other's tokens."""
    with RunningStack(scripted={"step_cost_us": 10000.0}) as stack:
        engine = stack.start("unified")[0]
        with BareGateway(engine) as gateway:
            request = engine_pb2.GenerateRequest(
                request_id="r",
                gateway_id="bare",
                prompt_ids=[1, 2, 3],
                sampling=engine_pb2.Sampling(max_tokens=3000, top_p=1.0, repetition_penalty=1.0),
                stream=7,
            )
            first = gateway.stub.Generate.future(request, metadata=METADATA, timeout=60)
            eventually(lambda: engine.inspect()["streams"] == 1, "it runs")
            refused = gateway.stub.Generate(request, metadata=METADATA, timeout=30).refused
            assert refused.reason == "StreamTaken"
            first.cancel()
            eventually(lambda: engine.inspect()["streams"] == 0, "it is gone")
            request.sampling.max_tokens = 2
            assert gateway.stub.Generate(request, metadata=METADATA, timeout=30).ended.num_tokens == 2
        engine.settled()


def test_the_ttl_ends_a_lease_whose_reader_does_not_read():
    """Byte stream: the reader fetches and takes nothing; its records go back with the ttl all the same."""
    with RunningStack(spec={"transport": "stream", "memory_bytes": 64 << 20}) as stack:
        prefill = stack.start("prefill")[0]
        with grpc.insecure_channel(prefill.ready["source_address"]) as channel:
            pending: Queue[object] = Queue()
            pending.put(open_message(stack, prefill, channel, ttl_ms=1500))
            call = source_pb2_grpc.SourceStub(channel).Lease(iter(pending.get, None), metadata=METADATA, timeout=60)
            granted: list[source_pb2.RecordName] = []
            for message in (message for together in call for message in together.messages):
                for r in message.granted.records:
                    granted.append(source_pb2.RecordName(kind=r.kind, record=r.record, generation=r.generation))
                if message.WhichOneof("kind") == "complete":
                    break
            for _ in range(2000):
                pending.put(source_pb2.ReaderMessage(fetch=source_pb2.Fetch(records=granted)))
            prefill.settled()
            call.cancel()
            pending.put(None)


def sidecar_of(engine: EngineProcess) -> int:
    """The one that lives now: an engine may have had several."""
    children = psutil.Process(engine.supervisor).children()
    return next(c.pid for c in children if "sluice_engine.transfer.sidecar" in c.cmdline())


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_a_transport_dies_with_rooms_open_and_more_arriving(victim):
    """Nobody hangs: each is answered, or fails by a name, in seconds; then the pair serves on."""
    with ExitStack() as exits:
        stack = exits.enter_context(RunningStack(scripted={"token_cost_us": 300.0}, spec={"max_running": 32}))
        prefill, decode = stack.start("prefill", "decode")
        gateway = exits.enter_context(BareGateway(decode))
        address = prefill.ready["source_address"]
        assert gateway.generate(address, [5] * 40).reason == "length"
        with ThreadPoolExecutor(24) as pool:
            for turn in range(3):
                early = [pool.submit(gateway.generate, address, [turn, i] * 150, timeout=40) for i in range(8)]
                eventually(lambda: decode.inspect()["rooms"]["reader"] > 0, "rooms are open")
                os.kill(sidecar_of(stack.engines[victim]), signal.SIGKILL)
                late = [pool.submit(gateway.generate, address, [turn, 50 + i] * 30, timeout=40) for i in range(12)]
                for future in (*early, *late):
                    ended = future.result()
                    failed = isinstance(ended, engine_pb2.EngineRefused) or ended.error
                    assert failed or ended.num_tokens == 6, ended
                served = eventually(lambda turn=turn: serve(gateway, address, turn), "it serves again")
                assert served.num_tokens == 6
        for engine in stack.engines.values():
            engine.settled()


def serve(gateway: BareGateway, address: str, turn: int) -> engine_pb2.Ended | None:
    told = gateway.generate(address, [turn] * 33)
    return told if isinstance(told, engine_pb2.Ended) and told.reason == "length" else None
