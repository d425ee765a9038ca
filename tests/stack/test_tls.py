"""Real processes over TLS: an answer through the replacement of the CA, strangers at the door, health all the while."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import takewhile
from urllib.request import urlopen

import grpc
import pytest
from stack_double import KEY, RunningStack
from tls_folder import TlsFolder, authority, leaf, secrets

from sluice_launch.process import Late, eventually
from sluice_operator.keys.rotation import BeginRotation, Lives, rotate
from sluice_operator.names import PodRole
from sluice_protocol.v1 import engine_pb2, engine_pb2_grpc
from sluice_runtime.rpc.options import KEY_HEADER

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]
# As many as there is room for; nobody waits for the last.
TOKENS = 8000


class TlsStack(RunningStack):
    """Each role has a volume; `peer` is shown by what the test itself does, as the operator."""

    def certify(self):
        self.secrets = secrets()
        self.folders = {role: TlsFolder(self.directory / "tls" / role.value) for role in PodRole}
        self.spread()

    def spread(self):
        for role, folder in self.folders.items():
            folder.write(self.secrets.leaves[role].data())

    def tls(self, role):
        return str(self.folders[PodRole(role)].path)

    def spawn(self, role, name, more):
        return super().spawn(role, name, more | {"tls": self.tls(role)})

    def stub(self, address, role, issued, name="operator"):
        options = [("grpc.ssl_target_name_override", f"{role}.m.ns.sluice.dev")]
        credentials = grpc.ssl_channel_credentials(issued.authorities, issued.key, issued.certificate)
        return grpc.secure_channel(address, credentials, options=options)

    def is_read(self, process):
        """Whether it shows and trusts what its role's Secret says now."""
        told = status(process)
        leaf = self.secrets.seen.leaves[PodRole(told["role"])]
        shown = told["certificate"]
        return set(shown["trusted"]) == leaf.trusted and shown["not_after"] == leaf.not_after

    def operator(self):
        seen = self.secrets.seen
        return self.secrets.issue("operator", seen.current.id, {seen.current.id}, time.time() + 3600)


@contextmanager
def running():
    with TlsStack(scripted={"token_cost_us": 4000.0}) as stack:
        stack.certify()
        stack.start("prefill", "decode", log="json")
        stack.start_gateway("--tls-dir", stack.tls("gateway"), health={"floor_s": 30.0})
        yield stack


@pytest.fixture
def stack():
    with running() as stack:
        yield stack


def status(process):
    """Of a supervisor, from the address that it said at first."""
    probes = next(event["probes"] for event in process.events if event["event"] == "supervising")
    with urlopen(f"{probes}/status", timeout=20) as answer:
        return json.load(answer)


def test_an_answer_goes_on_through_the_replacement_of_the_ca(stack):
    processes = [engine.process for engine in stack.engines.values()] + [stack.gateway]
    before = stack.secrets.seen.current.id
    chat, got, enough = stack.chat("hello", max_tokens=TOKENS, ignore_eos=True), [], threading.Event()
    reading = threading.Thread(target=lambda: got.extend(takewhile(lambda _: not enough.is_set(), chat)), daemon=True)
    reading.start()
    eventually(lambda: got, "the answer has begun")
    stack.secrets.obey(BeginRotation(before, time.time() + Lives().authority))
    while steps := rotate(replace(stack.secrets.seen, steady_s=1e9), time.time(), Lives()):
        for step in steps:
            stack.secrets.obey(step)
        stack.spread()
        for process in processes:
            eventually(partial(stack.is_read, process), "the process has read its certificate again")
        # New calls, rooms and Hellos under what there is now, beside the answer that began under the first CA.
        assert stack.chat("meanwhile", max_tokens=3).text()
    after, so_far = stack.secrets.seen.current.id, len(got)
    eventually(lambda: len(got) > so_far + 20, "the answer goes on")
    for process in processes:
        told = status(process)
        assert told["certificate"]["trusted"] == [after] != [before]
        assert told["verdict"] in ("idle", "progressing", "slow")
        assert told["certificate"]["counters"] == {"changed": 3}
    enough.set()
    reading.join(30)
    assert not reading.is_alive()
    chat.drop()
    text = stack.chat("hello", max_tokens=so_far, ignore_eos=True).text()
    assert "".join(got).startswith(text)
    assert len(text) > 0


def test_strangers_are_refused_and_named_and_health_is_not_impressed(monkeypatch, capfd):
    # What gRPC says of handshakes that failed belongs to the logs of a server, and is there unless somebody says so.
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    with running() as stack:  # in the test itself: capfd does not hear who was started by a fixture
        refuse_strangers(stack, capfd)


def refuse_strangers(stack, capfd):
    decode = stack.engines["decode-0"]
    ours, other = stack.secrets.authority.current, authority()
    strangers = {
        "another CA": leaf(other, "gateway", trusted=[ours]),
        "expired": leaf(ours, "gateway", until=time.time() - 60),
    }
    for issued in strangers.values():
        with stack.stub(decode.address, "decode", issued) as channel, pytest.raises(grpc.RpcError) as caught:
            engine_pb2_grpc.EngineStub(channel).Load(engine_pb2.LoadRequest(), timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    with grpc.insecure_channel(decode.address) as channel, pytest.raises(grpc.RpcError) as caught:
        engine_pb2_grpc.EngineStub(channel).Load(engine_pb2.LoadRequest(), timeout=20)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    told = ((KEY_HEADER, KEY),)
    with stack.stub(decode.address, "decode", leaf(ours, "prefill")) as channel, pytest.raises(grpc.RpcError) as caught:
        engine_pb2_grpc.EngineStub(channel).Load(engine_pb2.LoadRequest(), metadata=told, timeout=20)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "this certificate is of prefill.m.ns.sluice.dev" in caught.value.details()
    with stack.stub(decode.address, "decode", stack.operator()) as channel:
        engine_pb2_grpc.EngineStub(channel).Load(engine_pb2.LoadRequest(), metadata=told, timeout=20)
    heard, missing = "", {"certificate has expired", "caller refused", "unable to get local issuer", "WRONG_VERSION"}
    deadline = time.monotonic() + 30.0
    while missing:
        heard += capfd.readouterr().err
        missing = {word for word in missing if word not in heard}
        assert not missing or time.monotonic() < deadline, f"not in the engine's log: {missing}: {heard}"
        time.sleep(0.05)
    counted = {"refused_callers": 1}
    eventually(lambda: status(decode.process)["certificate"]["counters"] == counted, "the refused one is counted")
    assert status(decode.process)["verdict"] == "idle"
    assert stack.chat("hello", max_tokens=3).text()


def test_an_engine_that_nobody_believes_is_told_of_by_the_gateway_and_comes_back_with_a_good_certificate(stack):
    other = authority()
    stranger = leaf(other, "decode", trusted=[other, stack.secrets.authority.current])
    stack.folders[PodRole.DECODE].write(stranger.data())
    decode = stack.engines["decode-0"]
    eventually(lambda: other.id in status(decode.process)["certificate"]["trusted"], "it has the other certificate")
    # Connections that are there stay; a gateway that begins anew sees who it is.
    stack.gateway.end()
    stack.gateway = None
    with pytest.raises(Late, match="the gateway sees a pair"):
        stack.start_gateway("--tls-dir", stack.tls("gateway"), ready_s=3.0, health={"floor_s": 30.0})
    (told,) = [e for e in status(stack.gateway)["gateway"]["engines"] if e["role"] == "decode"]
    assert "is signed by none of the CAs that we trust" in told["trouble"]
    assert stack.get("/readyz")[0] == 503
    stack.spread()
    eventually(lambda: stack.get("/readyz")[0] == 200, "the gateway sees a pair")
    assert stack.chat("hello", max_tokens=3).text()


def test_an_engine_without_a_certificate_says_so_and_ends():
    with TlsStack() as stack:
        stack.certify()
        stack.folders[PodRole.PREFILL].write({"tls.crt": b"", "tls.key": b"", "ca.crt": b""})
        process = stack.spawn("prefill", "prefill-0", {})
        try:
            died = process.wait_for("died")
            assert process.popen.wait(60) == 1
        finally:
            process.end()
        assert died["reason"] == "IdentityInvalid"
        assert "tls.crt" in died["detail"]
