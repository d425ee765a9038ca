"""Real gRPC servers and clients of the project over TLS: who is let in, what the others are told, and that streams
live on while certificates and CAs are replaced."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import grpc.aio
import pytest
from tls_folder import TlsFolder, authority, leaf, secrets
from tls_stack import KEY, LOAD, LeaseEnds, start_engine

from sluice_gateway.http.server import serving_reports
from sluice_gateway.routing.client import GrpcEngine, grpc_factory
from sluice_gateway.routing.engine import EngineLost
from sluice_gateway.routing.fleet import Member
from sluice_operator.decide.observed import Pod
from sluice_operator.keys.rotation import BeginRotation, Lives, rotate
from sluice_operator.live.fleet import Contact
from sluice_operator.live.fleet_client import LiveFleet
from sluice_operator.names import PodRole
from sluice_protocol.fleet import FleetReport
from sluice_protocol.generate import SCHEMA_VERSION, Ended, EndReason, GenerateRequest, Role, TokenBatch
from sluice_protocol.sampling import Sampling
from sluice_protocol.v1 import fleet_pb2
from sluice_runtime import log
from sluice_runtime.rpc.options import KEY_HEADER
from sluice_runtime.tls import keeper as keepers
from sluice_runtime.tls.client import open_channel
from sluice_runtime.tls.diagnosis import why_not
from sluice_runtime.tls.identity import Identity
from sluice_runtime.tls.keeper import IdentityKeeper
from sluice_runtime.tls.peers import CALLERS, Peer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]
CA, OTHER = authority(), authority()
REQUEST = GenerateRequest("r", "gw", (1, 2, 3), (), Sampling(max_tokens=9), "source:1")
# More than anything here takes; what hangs takes it all.
PATIENCE_S = 15.0


@pytest.fixture(autouse=True)
def _looks_at_once(monkeypatch):
    monkeypatch.setattr(keepers, "LOOK_S", 0.0)


@pytest.fixture
def keep(tmp_path):
    """A keeper of what is in a volume, by role: `keep("decode", leaf(CA, "decode"))`."""

    def made(role, issued):
        folder = TlsFolder(tmp_path / f"{role}-{time.monotonic_ns()}", issued.data())
        return IdentityKeeper(folder.path, Peer(role))

    return made


@pytest.fixture
async def engine(keep):
    """A decode engine over TLS: (the fake, its address, its keeper)."""
    keeper = keep("decode", leaf(CA, "decode"))
    fake, address, server = await start_engine(Role.DECODE, keeper)
    yield fake, address, keeper
    await server.stop(None)


@asynccontextmanager
async def listening(handle):
    """The address of a server that does `handle` with each connection; nothing of them is left."""
    tasks, writers = set(), set()

    async def begun(reader, writer):
        tasks.add(asyncio.current_task())
        writers.add(writer)
        await handle(reader, writer)

    server = await asyncio.start_server(begun, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:
            writer.transport.abort()
        await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)
        await server.wait_closed()


async def hello(address, keeper, peer=Peer.DECODE):
    client = GrpcEngine(address, KEY, timeout_s=PATIENCE_S, identity=keeper, peer=peer)
    try:
        return await client.hello()
    finally:
        await client.close()


async def test_a_gateway_and_an_engine_of_one_deployment_understand_each_other(engine, keep):
    assert (await hello(engine[1], keep("gateway", leaf(CA, "gateway")))).role is Role.DECODE


GATEWAY = leaf(CA, "gateway")
STRANGERS = {
    "another CA": (leaf(OTHER, "gateway", trusted=[OTHER, CA]), "refuses our certificate: it trusts none of the CAs"),
    "expired": (leaf(CA, "gateway", until=time.time() - 100), r"refuses our certificate: it expired \d+ s ago"),
    "trusts another CA": (leaf(OTHER, "gateway"), "is signed by none of the CAs that we trust"),
}


@pytest.mark.parametrize("who", STRANGERS)
async def test_strangers_are_refused_at_once_and_told_why(engine, keep, who):
    issued, words = STRANGERS[who]
    began = time.monotonic()
    with pytest.raises(EngineLost, match=words) as caught:
        await hello(engine[1], keep("gateway", issued))
    assert time.monotonic() - began < PATIENCE_S
    assert engine[1] in str(caught.value)
    assert engine[0].calls["Hello"] == 0


async def test_plain_text_is_refused_at_once_and_told_why(engine):
    with pytest.raises(EngineLost, match="speaks TLS, and we do not: start us with --tls-dir"):
        await hello(engine[1], None)


async def test_an_engine_without_tls_is_told_of_as_such(keep):
    _, address, server = await start_engine(Role.DECODE, None)
    with pytest.raises(EngineLost, match="does not speak TLS: let it have --tls-dir too"):
        await hello(address, keep("gateway", GATEWAY))
    await server.stop(None)


async def test_an_engine_that_is_somebody_else_is_not_believed(engine, keep):
    """Another role's certificate is as good as none: an address that a pod had before is another pod's today."""
    with pytest.raises(EngineLost, match=r"is not of prefill\.m\.ns\.sluice\.dev"):
        await hello(engine[1], keep("gateway", GATEWAY), Peer.PREFILL)
    with pytest.raises(EngineLost, match=r"is not of decode\.n\.ns\.sluice\.dev"):
        await hello(engine[1], keep("gateway", leaf(CA, "gateway", name="n")))


async def test_where_nobody_has_said_which_role_it_is_any_engine_is_believed_and_nobody_else(engine, keep):
    gateway = keep("gateway", GATEWAY)
    discovered = grpc_factory(Member(None, engine[1]), KEY, gateway)
    assert (await discovered.hello()).role is Role.DECODE
    await discovered.close()
    _, address, server = await start_engine(Role.DECODE, keep("gateway", leaf(CA, "gateway")))
    posing = grpc_factory(Member(None, address), KEY, gateway)
    with pytest.raises(EngineLost, match=r"is not of engine\.m\.ns\.sluice\.dev"):
        await posing.hello()
    await posing.close()
    await server.stop(None)


async def test_reports_are_for_the_operator(keep):
    gateway = keep("gateway", GATEWAY)
    async with serving_reports(lambda: FleetReport("g", True), "127.0.0.1:0", KEY, gateway) as address:
        for role, wanted in ((Peer.OPERATOR, grpc.StatusCode.OK), (Peer.DECODE, grpc.StatusCode.PERMISSION_DENIED)):
            identity = Identity.of(leaf(CA, role.value).data())
            async with open_channel(address, Peer.GATEWAY, identity, ()) as channel:
                asked = channel.unary_unary("/sluice.v1.Fleet/Report")
                request = fleet_pb2.ReportRequest(schema_version=SCHEMA_VERSION).SerializeToString()
                call = asked(request, metadata=((KEY_HEADER, KEY),), timeout=PATIENCE_S)
                assert await call.code() is wanted


async def test_the_operator_comes_to_its_pods_by_certificate_and_anew_when_it_is_another(engine, keep):
    """Its own client: a pod that does not believe it is one of which nothing is known."""
    pod = Pod("d-0", "d-0", PodRole.DECODE, "r", 0.0, "1", ready=True, started=True)
    live = LiveFleet(dial=lambda _address, _port: engine[1], call_s=PATIENCE_S)

    async def load(ca, **more):
        identity = Identity.of(leaf(ca, "operator", **more).data())
        heard = await live.look(Contact("ns", "m", {"d-0": "10.0.0.1"}, KEY, identity), [pod])
        return heard.loads.get("d-0")

    assert (await load(CA)).running == LOAD.running
    assert await load(OTHER, trusted=[OTHER, CA]) is None
    assert (await load(CA)).running == LOAD.running
    await live.close()


async def test_an_engine_whose_certificate_has_expired_is_not_believed(keep):
    keeper = keep("decode", leaf(CA, "decode", until=time.time() - 5))
    _, address, server = await start_engine(Role.DECODE, keeper)
    with pytest.raises(EngineLost, match=r"the certificate of .* has expired"):
        await hello(address, keep("gateway", GATEWAY))
    await server.stop(None)


async def test_where_nobody_is_tls_is_not_blamed(keep, engine):
    gateway = keep("gateway", GATEWAY)
    assert await why_not("127.0.0.1:1", Peer.DECODE, gateway.current) == ""
    assert await why_not(engine[1], Peer.DECODE, gateway.current) == ""
    async with listening(lambda _reader, _writer: asyncio.sleep(PATIENCE_S)) as silent:
        began = time.monotonic()
        assert await why_not(silent, Peer.DECODE, gateway.current, timeout_s=0.3) == ""
        assert time.monotonic() - began < PATIENCE_S / 2


async def test_a_connection_may_take_its_time(engine, keep):
    """A handshake costs both sides computing: on machines that are busy it takes longer than a round trip."""

    async def slowly(reader, writer):
        host, port = engine[1].split(":")
        there, back = await asyncio.open_connection(host, int(port))

        async def pass_on(source, sink):
            while data := await source.read(65536):
                await asyncio.sleep(0.3)
                sink.write(data)
            sink.close()

        try:
            await asyncio.gather(pass_on(reader, back), pass_on(there, writer), return_exceptions=True)
        finally:
            back.transport.abort()

    async with listening(slowly) as address:
        assert (await hello(address, keep("gateway", GATEWAY))).incarnation == "i1"


@pytest.mark.parametrize("role", list(Peer))
async def test_each_role_may_call_what_is_its_own_and_nothing_else(engine, keep, role, monkeypatch):
    """Every call of the table to one server: what is let in meets a service that may not be there."""
    said = []
    monkeypatch.setattr(log, "warning", lambda event, **fields: said.append((event, fields)))
    identity = Identity.of(leaf(CA, role.value).data())
    async with open_channel(engine[1], Peer.DECODE, identity, ()) as channel:
        for method, allowed in CALLERS.items():
            if "/sluice.v1.Engine/" not in method or method.endswith(("Attach", "Generate", "Drain", "Inspect")):
                continue
            call = channel.unary_unary(method)(b"", metadata=((KEY_HEADER, KEY),), timeout=PATIENCE_S)
            code, detail = await call.code(), await call.details()
            if role in allowed:
                assert code is grpc.StatusCode.OK, detail
            else:
                assert code is grpc.StatusCode.PERMISSION_DENIED
                assert f"this certificate is of {role}.m.ns.sluice.dev" in detail
        attach = channel.unary_stream("/sluice.v1.Engine/Attach")(b"", metadata=((KEY_HEADER, KEY),))
        if role is Peer.GATEWAY:
            assert await attach.read() == b""
            attach.cancel()
        else:
            assert await attach.code() is grpc.StatusCode.PERMISSION_DENIED
    refused = [fields["why"] for event, fields in said if event == "caller refused"]
    assert len(refused) == len(set(refused)) == engine[2].counters["refused_callers"] > 0 or role is Peer.GATEWAY


async def test_a_right_certificate_does_not_replace_the_key(engine, keep):
    client = GrpcEngine(engine[1], "guess", timeout_s=PATIENCE_S, identity=keep("gateway", GATEWAY))
    with pytest.raises(EngineLost, match="UNAUTHENTICATED"):
        await client.hello()
    await client.close()


async def test_a_lease_is_for_decode_engines_only_and_a_stranger_fails_its_room_by_name(keep):
    source = keep("prefill", leaf(CA, "prefill"))
    async with LeaseEnds(source, keep("decode", leaf(CA, "decode"))) as ends:
        await ends.grant(await ends.opened(1), 0)
    for role, issued, words in (
        ("gateway", leaf(CA, "gateway"), "is for the decode of m.ns.sluice.dev"),
        ("decode", leaf(OTHER, "decode", trusted=[OTHER, CA]), "refuses our certificate"),
        ("decode", leaf(OTHER, "decode"), "signed by none of the CAs that we trust"),
    ):
        async with LeaseEnds(source, keep(role, issued)) as ends:
            ends.open(1)
            _, _, reason, detail = await ends.heard(ends.reader, "failed")
            assert reason == "SourceLost"
            assert words in detail


class Rotating:
    """The Secrets of a deployment, the volumes of its roles, and their keepers; turns of the operator by hand."""

    def __init__(self, path):
        self.secrets = secrets()
        self.folders = {role: TlsFolder(path / role.value, self.secrets.leaves[role].data()) for role in PodRole}
        self.keepers = {role: IdentityKeeper(self.folders[role].path, Peer(role.value)) for role in PodRole}

    def step(self, settled=True):
        """One turn under virtual time: what there is to do, and how it gets to each role's pods."""
        seen = replace(self.secrets.seen, steady_s=1e9 if settled else 0.0)
        steps = rotate(seen, time.time(), Lives())
        for step in steps:
            self.secrets.obey(step)
        return steps

    def spread(self, role):
        self.folders[role].write(self.secrets.leaves[role].data())
        self.keepers[role].look()

    def begin(self):
        self.secrets.obey(BeginRotation(self.secrets.seen.current.id, time.time() + Lives().authority))


async def test_attach_and_lease_live_through_the_replacement_of_the_ca(tmp_path):
    world = Rotating(tmp_path)
    before = world.secrets.seen.current.id
    fake, address, server = await start_engine(Role.DECODE, world.keepers[PodRole.DECODE])
    client = GrpcEngine(address, KEY, timeout_s=PATIENCE_S, identity=world.keepers[PodRole.GATEWAY])
    attached = client.attach("gw")
    await anext(attached)
    generate = client.generate(REQUEST)
    steps, number = [], 0
    async with LeaseEnds(world.keepers[PodRole.PREFILL], world.keepers[PodRole.DECODE]) as ends:
        lease = await ends.opened(1)
        world.begin()
        while turn := world.step():
            steps += [type(step).__name__ for step in turn]
            for role in PodRole:
                world.spread(role)
                number += 1
                # What was begun under the first CA goes on, and what begins now does so under what there is now.
                fake.batches.put_nowait(TokenBatch(number, (1,), (1,), (number,)))
                async with asyncio.timeout(PATIENCE_S):
                    assert (await anext(attached)).tokens == (number,)
                await ends.grant(lease, number)
                assert await client.load() == LOAD
                fresh = GrpcEngine(address, KEY, timeout_s=PATIENCE_S, identity=world.keepers[PodRole.GATEWAY])
                assert (await fresh.hello()).incarnation == "i1"
                await fresh.close()
                await ends.grant(await ends.opened(100 + number), number)
        assert steps == ["SetTrust"] * 3 + ["IssueLeaf"] * 3 + ["SetTrust"] * 3 + ["FinishRotation"]
        assert {keeper.current.trusted for keeper in world.keepers.values()} == {(world.secrets.seen.current.id,)}
        assert world.secrets.seen.current.id != before
        assert fake.calls["Attach ended"] == 0
        fake.ended.set()
        assert await generate.reply() == Ended(EndReason.STOP, 0)
        # One that still shows what the first CA signed is a stranger now.
        late = Identity.of(leaf(CA, "gateway", trusted=[CA]).data())
        assert "signed by none" in await why_not(address, Peer.DECODE, late)
        assert ends.attached.count("s1") >= 2  # Hello again under each certificate of the reader's
    await attached.aclose()
    await client.close()
    await server.stop(None)


async def test_the_old_channel_goes_when_its_last_call_has_ended(engine, keep):
    fake, address, _ = engine
    gateway = keep("gateway", GATEWAY)
    client = GrpcEngine(address, KEY, timeout_s=PATIENCE_S, identity=gateway)
    generate = client.generate(REQUEST)
    await client.load()
    gateway.current = Identity.of(leaf(CA, "gateway").data())
    await client.load()
    lines = client._lines
    (old,) = lines._old
    assert old.calls == 1
    fake.ended.set()
    await generate.reply()
    async with asyncio.timeout(PATIENCE_S):
        while lines._old or lines._closing:  # noqa: ASYNC110  # nobody else waits for a channel's end
            await asyncio.sleep(0)
    assert await client.load() == LOAD
    await client.close()
