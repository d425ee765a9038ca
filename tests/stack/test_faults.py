"""Real processes: clients that go away in every phase, engines that are killed in the middle of an answer.

After each: the next request is served, every byte is accounted for, nothing is left behind.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator

import grpc
import pytest
from stack_double import KEY, EngineProcess, RunningStack

from sluice_launch.process import Late, eventually, stop_process
from sluice_protocol.codec import encode_sampling
from sluice_protocol.generate import SCHEMA_VERSION
from sluice_protocol.sampling import Sampling
from sluice_protocol.v1 import engine_pb2, engine_pb2_grpc
from sluice_runtime.rpc.options import KEY_HEADER

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

SHORT = "tell me everything, from the beginning"
LONG = "a long story " * 60  # about 800 tokens of one byte each


@pytest.fixture(scope="module")
def slow() -> Iterator[RunningStack]:
    """One pair, two rows each; a token costs time, so that every phase can be met."""
    with RunningStack(scripted={"token_cost_us": 1500.0}, spec={"max_running": 2}) as stack:
        stack.start("prefill", "decode")
        stack.start_gateway()
        yield stack


def phase_of(stack: RunningStack, engine: str, phase: str) -> bool:
    return bool(stack.engines[engine].inspect()["sequences"].get(phase))


def assert_well(stack: RunningStack) -> None:
    """The next request is served; the books are exact."""
    again = stack.chat("are you well?", max_tokens=5)
    assert len(again.text()) == 5
    for engine in stack.engines.values():
        engine.settled()


def test_the_way_a_request_takes(slow):
    stream = slow.chat("hello " * 20, max_tokens=12)
    assert len(stream.text()) == 12
    assert stream.route["transport"] == "nixl"
    assert stream.route["prefill_pid"] == slow.engines["prefill-0"].pid("leader")
    assert stream.route["decode_pid"] == slow.engines["decode-0"].pid("leader")
    assert stream.route["records"] >= 8
    assert stream.route["chunks"] >= 2
    assert_well(slow)


def test_a_client_goes_while_prefilling(slow):
    stream = slow.chat(LONG + "1", max_tokens=50)
    eventually(lambda: phase_of(slow, "prefill-0", "prefilling"), "it prefills")
    stream.drop()
    assert_well(slow)


def test_a_client_goes_while_decoding(slow):
    stream = slow.chat("count for me", max_tokens=2000)
    pieces = iter(stream)
    for _ in range(5):
        next(pieces)
    assert phase_of(slow, "decode-0", "decoding")
    stream.drop()
    assert_well(slow)


def test_a_client_goes_while_queued(slow):
    running = [slow.chat(f"{i} talk", max_tokens=400) for i in range(2)]
    readers = [iter(stream) for stream in running]
    for reader in readers:
        next(reader)
    queued = slow.chat("am I next?", max_tokens=400)
    # It is in the gateway: both rows are taken and no engine has heard of it.
    eventually(lambda: slow.engines["decode-0"].inspect()["streams"] == 2, "two run")
    queued.drop()
    for stream in running:
        stream.drop()
    assert_well(slow)


def test_a_client_goes_while_pulling(slow):
    """The reader's sidecar is stopped, so that the pull cannot end; then it goes on and finds nobody waiting."""
    sidecar = slow.engines["decode-0"].pid("sidecar")
    stop_process(sidecar)
    try:
        stream = slow.chat(LONG + "2", max_tokens=50)
        assert next(iter(stream))  # the first token comes from prefill, before the pull ends
        assert phase_of(slow, "decode-0", "pulling")
        stream.drop()
        eventually(lambda: phase_of(slow, "decode-0", "ending"), "the reader gave up")
        told = slow.engines["decode-0"].inspect()
        assert told["ledger"]["page"]["filling"] > 0  # still nobody's: something may land
    finally:
        os.kill(sidecar, signal.SIGCONT)
    assert_well(slow)


def test_garbage_on_the_engines_port_ends_its_own_connection(slow):
    host, port = slow.engines["prefill-0"].ready["source_address"].split(":")
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 5000, os.urandom(4096)):
        with socket.create_connection((host, int(port)), timeout=10) as sock:
            sock.sendall(garbage)
    assert_well(slow)


def test_the_transport_sidecar_is_killed_and_comes_back(slow):
    for name in ("decode-0", "prefill-0"):
        engine = slow.engines[name]
        before = len([e for e in engine.process.events if e.get("sidecar_event") == "ready"])
        pid = engine.pid("sidecar") if before == 1 else None
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        eventually(
            lambda engine=engine, before=before: (
                len([e for e in engine.process.events if e.get("sidecar_event") == "ready"]) > before
            ),
            "a new sidecar",
        )
    eventually(lambda: slow.get("/readyz")[0] == 200, "routable")
    assert_well(slow)


def busiest(stack: RunningStack, role: str) -> EngineProcess | None:
    """The engine of this role that has the most to do, if one has anything."""
    told = [(sum(e.inspect()["sequences"].values()), e.name) for e in stack.engines.values() if e.role == role]
    count, name = max(told)
    return stack.engines[name] if count else None


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, str]:
    """What the two requests below get when nobody dies: by their text."""
    with RunningStack(scripted={}) as stack:
        stack.start("unified")
        stack.start_gateway()
        return {text: stack.chat(text, tokens).text() for text, tokens in ((SHORT, 60), (LONG, 12))}


def kill(engine: EngineProcess, what: str) -> None:
    os.kill(engine.supervisor if what == "supervisor" else engine.pid(what), signal.SIGKILL)


@pytest.mark.parametrize("what", ["supervisor", "leader", "rank"])
def test_a_decode_engine_is_killed_in_the_middle_and_the_text_is_the_same(what, undisturbed):
    """Two pairs; the gateway goes on over prompt and output on what is left."""
    with RunningStack(scripted={"step_cost_us": 15000.0}) as stack:
        stack.start("prefill", "decode", "decode")
        stack.start_gateway()
        streams = [stack.chat(SHORT, 60) for _ in range(4)]
        readers = [iter(stream) for stream in streams]
        texts = ["".join(next(reader) for _ in range(3)) for reader in readers]
        victim = busiest(stack, "decode")
        assert victim is not None
        kill(victim, what)
        texts = [text + "".join(reader) for text, reader in zip(texts, readers, strict=True)]
        assert texts == [undisturbed[SHORT]] * 4
        assert max(stream.route["tries"] for stream in streams) > 1
        assert stack.forget(victim.name) != 0
        stack.write_fleet()
        assert_well(stack)


@pytest.mark.parametrize("what", ["supervisor", "leader", "rank"])
def test_a_prefill_engine_is_killed_in_the_middle_and_the_text_is_the_same(what, undisturbed):
    with RunningStack(scripted={"token_cost_us": 1500.0}) as stack:
        stack.start("prefill", "prefill", "decode")
        stack.start_gateway()
        stream = stack.chat(LONG, 12)
        victim = eventually(lambda: busiest(stack, "prefill"), "it prefills")
        kill(victim, what)
        assert stream.text() == undisturbed[LONG]
        assert stream.route["tries"] > 1
        assert stack.forget(victim.name) != 0
        stack.write_fleet()
        assert_well(stack)


def test_two_checkpoints_of_one_shape_are_no_pair():
    """They differ in a value only. The gateway makes no pair of them, and the source itself refuses the lease."""
    with RunningStack() as stack:
        prefill = stack.start("prefill", scripted={"step_cost_us": 1.0})[0]
        decode = stack.start("decode", scripted={"step_cost_us": 2.0})[0]
        with pytest.raises(Late, match="sees a pair"):
            stack.start_gateway(ready_s=3.0)
        status, body = stack.get("/readyz")
        assert status == 503
        assert "differ in model" in str(body)
        ended = generate_directly(decode, prefill.ready["source_address"])
        assert (ended.reason, ended.error) == ("failed", "FingerprintMismatch")
        assert "model" in ended.detail
        prefill.settled()
        decode.settled()


def generate_directly(decode: EngineProcess, source_address: str) -> engine_pb2.Ended:
    """As a gateway that pairs what is no pair."""
    metadata = ((KEY_HEADER, KEY),)
    with grpc.insecure_channel(decode.address) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        attach = stub.Attach(engine_pb2.AttachRequest(gateway_id="test"), metadata=metadata)
        next(attach)
        request = engine_pb2.GenerateRequest(
            request_id="r",
            gateway_id="test",
            prompt_ids=[1, 2, 3],
            sampling=encode_sampling(Sampling(max_tokens=4)),
            source_address=source_address,
        )
        reply = stub.Generate(request, metadata=metadata, timeout=30)
        attach.cancel()
    return reply.ended


def test_a_caller_without_the_key_is_refused(slow):
    with grpc.insecure_channel(slow.engines["decode-0"].address) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        for metadata in ((), ((KEY_HEADER, "guess"),)):
            with pytest.raises(grpc.RpcError) as info:
                stub.Hello(engine_pb2.EngineHelloRequest(schema_version=SCHEMA_VERSION), metadata=metadata, timeout=20)
            assert info.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_sigterm_drains_what_runs_is_finished_and_the_rest_goes_elsewhere(role, undisturbed):
    with RunningStack(scripted={"step_cost_us": 15000.0}) as stack:
        stack.start("prefill", "prefill", "decode", "decode")
        stack.start_gateway()
        stream = stack.chat(SHORT, 60)
        reader = iter(stream)
        text = next(reader)
        victim = busiest(stack, "decode") if role == "decode" else stack.engines["prefill-0"]
        assert victim is not None
        os.kill(victim.supervisor, signal.SIGTERM)
        eventually(lambda: any(e.get("event") == "draining" for e in victim.process.events), "it drains")
        others = [stack.chat(f"{i} {SHORT}", 5) for i in range(3)]
        assert [len(other.text()) for other in others] == [5, 5, 5]
        text += "".join(reader)
        assert text == undisturbed[SHORT]
        assert stream.route["tries"] == 1  # finished where it ran
        assert stack.forget(victim.name) == 0
        stack.write_fleet()
        assert_well(stack)
