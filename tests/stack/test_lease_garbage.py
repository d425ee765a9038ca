"""Well-formed gRPC with nonsense in it: each ends its own stream, counted and answered; the lease thread lives on."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from queue import Queue

import grpc
import pytest
from stack_double import KEY, RunningStack

from sluice_engine.spec import load_spec, resolve
from sluice_launch.process import eventually
from sluice_protocol import codec
from sluice_protocol.fingerprint import Fingerprint
from sluice_protocol.generate import SCHEMA_VERSION
from sluice_protocol.sampling import Sampling
from sluice_protocol.source import Fetch, Open, Pulled, ReaderMessage, RecordName, SourceHello, WantPrefill
from sluice_protocol.v1 import source_pb2, source_pb2_grpc
from sluice_runtime.rpc.options import KEY_HEADER

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]
METADATA = ((KEY_HEADER, KEY),)


@pytest.fixture(scope="module")
def stack() -> Iterator[RunningStack]:
    with RunningStack() as running:
        running.start("prefill", "decode")
        running.start_gateway()
        yield running


@pytest.fixture
def channel(stack: RunningStack) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(stack.engines["prefill-0"].ready["source_address"]) as opened:
        yield opened


@pytest.fixture
def hello(stack: RunningStack, channel: grpc.Channel) -> SourceHello:
    """As a reader with the right fingerprint gets it."""
    path = next(stack.directory.glob("prefill-0-*/spec.json"))
    mine = resolve(load_spec(path)).fingerprint
    request = source_pb2.SourceHelloRequest(schema_version=SCHEMA_VERSION, fingerprint=mine.as_dict())
    return codec.decode_source_hello(source_pb2_grpc.SourceStub(channel).Hello(request, metadata=METADATA, timeout=20))


def opened(hello: SourceHello, **changes: object) -> Open:
    told: dict[str, object] = {
        "lease_id": "test",
        "incarnation": hello.incarnation,
        "fingerprint": hello.fingerprint,
        "want": WantPrefill(tuple(range(40)), (), Sampling(max_tokens=5)),
        "have_prefix": 0,
        "ttl_ms": 60_000,
    }
    return Open(**(told | changes))  # type: ignore[arg-type]


class Talk:
    """A lease stream that stays open on this side until `close`."""

    def __init__(self, channel: grpc.Channel, *messages: ReaderMessage) -> None:
        self._pending: Queue[object] = Queue()
        for message in messages:
            self._pending.put(codec.encode_reader_message(message))
        self.call = source_pb2_grpc.SourceStub(channel).Lease(
            iter(self._pending.get, None), metadata=METADATA, timeout=30
        )

    def kinds(self) -> list[str]:
        """Of all that comes back, to the end of the stream."""
        out = []
        with contextlib.suppress(grpc.RpcError):
            for together in self.call:
                out.extend(message.WhichOneof("kind") for message in together.messages)
        self._pending.put(None)
        return out


def talk(channel: grpc.Channel, *messages: ReaderMessage) -> tuple[list[str], grpc.StatusCode]:
    """(kinds of what came back, how the stream ended)."""
    lease = Talk(channel, *messages)
    return lease.kinds(), lease.call.code()


def refusal(channel: grpc.Channel, message: Open) -> source_pb2.Refused:
    lease = Talk(channel, message)
    refused = next(lease.call).messages[0].refused
    lease.kinds()
    return refused


def assert_well(stack: RunningStack) -> None:
    assert len(stack.chat("are you well?", 5).text()) == 5
    for engine in stack.engines.values():
        engine.settled()


def unknown_messages(stack: RunningStack) -> int:
    return int(stack.engines["prefill-0"].inspect()["counters"].get("unknown_messages", 0))


@pytest.mark.parametrize("first", [Pulled(), Fetch((RecordName("page", 0, 1),))], ids=["Pulled", "Fetch"])
def test_anything_before_open_is_answered_and_counted(stack, channel, first):
    before = unknown_messages(stack)
    kinds, code = talk(channel, first)
    assert (kinds, code) == ([], grpc.StatusCode.UNIMPLEMENTED)
    assert unknown_messages(stack) == before + 1
    assert_well(stack)


def test_open_twice_ends_that_lease(stack, channel, hello):
    before = unknown_messages(stack)
    _, code = talk(channel, opened(hello), opened(hello))
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert unknown_messages(stack) == before + 1
    assert_well(stack)


def test_a_fetch_of_what_was_not_granted_ends_that_lease(stack, channel, hello):
    _, code = talk(channel, opened(hello), Fetch((RecordName("page", 9999, 1),)))
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert_well(stack)


def test_another_fingerprint_is_refused_by_the_name_of_what_differs(stack, channel, hello):
    facts = hello.fingerprint.as_dict() | {"model": "another"}
    other = opened(hello, fingerprint=Fingerprint.of(facts))
    refused = refusal(channel, other)
    assert refused.reason == "FingerprintMismatch"
    assert "model: another there" in refused.detail
    assert_well(stack)


def test_another_incarnation_is_refused(stack, channel, hello):
    kinds, _ = talk(channel, opened(hello, incarnation="yesterday"))
    assert kinds == ["refused"]
    assert_well(stack)


def test_what_can_never_run_is_refused_without_a_retry(stack, channel, hello):
    want = WantPrefill((10**9,), (), Sampling(max_tokens=5))
    refused = refusal(channel, opened(hello, want=want))
    assert (refused.reason, refused.retry_after_ms) == ("TokenOutOfRange", 0)
    assert_well(stack)


def test_a_lease_ends_with_its_ttl_and_its_records_go_back(stack, channel, hello):
    kinds, code = talk(channel, opened(hello, ttl_ms=300))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert kinds[0] == "admitted"
    assert kinds[-1] == "complete"
    assert_well(stack)


def test_garbage_for_the_whole_life_of_the_thread(stack, channel, hello):
    """Random bytes, random mutations of real messages, empty oneofs; then a real request."""
    lease = channel.stream_stream(
        "/sluice.v1.Source/Lease", request_serializer=lambda data: data, response_deserializer=lambda data: data
    )
    source = random.Random(5)
    real = codec.encode_reader_message(opened(hello)).SerializeToString()
    codes = set()
    for turn in range(60):
        if turn % 3 == 0:
            garbage = source.randbytes(source.randrange(0, 300))
        elif turn % 3 == 1:
            mutated = bytearray(real)
            for _ in range(source.randrange(1, 8)):
                mutated[source.randrange(len(mutated))] = source.randrange(256)
            garbage = bytes(mutated)
        else:
            garbage = b"\x82\x06\x03abc"  # a field of tomorrow, and no kind that we know
        call = lease(iter([garbage, source.randbytes(20)]), metadata=METADATA, timeout=30)
        with contextlib.suppress(grpc.RpcError):
            for _ in call:
                pass
        codes.add(call.code())
    assert not codes & {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
    assert_well(stack)
    assert unknown_messages(stack) > 0


def test_a_reader_that_never_says_pulled_does_not_keep_its_records(stack, channel, hello):
    """Every place of the source is taken by completed leases of a peer that says nothing more: it is no idle engine,
    they end by name when their budget is over, and who has waited is answered."""
    prefill = stack.engines["prefill-0"]
    before = prefill.inspect()["counters"].get("leases_stalled", 0)
    places = prefill.inspect()["max_running"]
    leases = [Talk(channel, opened(hello, lease_id=f"kept-{n}", ttl_ms=2**32 - 1)) for n in range(places)]
    eventually(lambda: prefill.inspect()["sequences"].get("held") == places, "all of them are complete")
    eventually(lambda: prefill.probe("/health")[1]["verdict"] == "progressing", "it is not called idle")
    assert len(stack.chat("may I?", 5).text()) == 5
    assert prefill.inspect()["counters"]["leases_stalled"] > before
    assert {lease.kinds()[-1] for lease in leases} == {"complete"}
    assert {lease.call.code() for lease in leases} == {grpc.StatusCode.DEADLINE_EXCEEDED}
    assert all("not pulled within 10 s" in str(lease.call.details()) for lease in leases)
    assert_well(stack)
