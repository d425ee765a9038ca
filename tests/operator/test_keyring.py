"""Secrets as an API server has them: read, changed and made anew by the operator's own calls over HTTP."""

from __future__ import annotations

import base64
import itertools
import time
from types import SimpleNamespace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sluice_operator import names
from sluice_operator.api.spec import MetadataSpec
from sluice_operator.decide.actions import Certify
from sluice_operator.keys import certificates
from sluice_operator.keys.keyring import OWN_LIFE_S, Keyring
from sluice_operator.keys.rotation import BeginRotation, IssueLeaf, Lives, rotate
from sluice_operator.live.apply import DONE, STALE, Applier
from sluice_operator.live.cluster import Cluster
from sluice_operator.live.connection import Connection
from sluice_operator.names import PodRole
from sluice_runtime.tls.peers import Peer

SETTLE_S = Lives().settle
UID = "uid-1"


class SecretsApi:
    """Secrets of one namespace with resourceVersions. `allowed`: GET by name, POST, PUT; anything else is a failure."""

    def __init__(self):
        self.held, self.versions, self.calls = {}, itertools.count(1), []

    async def handle(self, request):
        name = request.path.partition("/secrets")[2].strip("/")
        self.calls.append((request.method, name))
        match request.method:
            case "GET" if name:
                return self._answer(200, self.held[name]) if name in self.held else self._answer(404, {})
            case "POST":
                item = await request.json()
                if item["metadata"]["name"] in self.held:
                    return self._answer(409, {})
                return self._keep(item)
            case "PUT":
                item = await request.json()
                there = self.held.get(name)
                if there is None:
                    return self._answer(404, {})
                if there.get("immutable"):
                    return self._answer(422, {"message": "field is immutable"})
                if item["metadata"]["resourceVersion"] != there["metadata"]["resourceVersion"]:
                    return self._answer(409, {})
                return self._keep(item)
        return self._answer(403, {})

    def _keep(self, item):
        item["metadata"]["resourceVersion"] = str(next(self.versions))
        self.held[item["metadata"]["name"]] = item
        return self._answer(200, item)

    def _answer(self, status, body):
        return web.json_response(body, status=status)

    def spoil(self, name, **data):
        encoded = {key.replace("_", "."): base64.b64encode(value).decode() for key, value in data.items()}
        item = self.held[name]
        self.held[name] = item | {"data": item["data"] | encoded}
        self.held[name]["metadata"] = item["metadata"] | {"resourceVersion": str(next(self.versions))}


class Operator:
    """One turn is: read what is there, decide, carry out. `now`: of all its clocks."""

    def __init__(self, cluster):
        self.cluster, self.now = cluster, time.time()
        self.keyring = Keyring("ns", "m", clock=lambda: self.now, wall=lambda: self.now)
        self.known = SimpleNamespace(keyring=self.keyring, secrets=set(), taken=set())
        extra = MetadataSpec(labels={"team": "search"})
        observed = SimpleNamespace(namespace="ns", name="m", uid=UID, children=(), metadata=extra)
        self.applier = Applier(cluster, None, observed, self.known)

    async def read(self):
        for name in names.secrets("m"):
            item = await self.cluster.find(f"/api/v1/namespaces/ns/secrets/{name}")
            if item is None:
                self.keyring.forget(name)
            else:
                self.keyring.read(item)
        return self.keyring.seen()

    async def turn(self, seconds=SETTLE_S / 2):
        steps = rotate(await self.read(), self.now, Lives())
        for step in steps:
            outcome = await self.applier.obey(Certify(step))
            assert outcome == DONE or outcome.stale is not None
        self.now += seconds
        return steps

    async def quiet(self):
        """Everything it did until there was nothing more to do for longer than it waits."""
        done, idle = [], 0
        while idle < 4:
            steps = await self.turn()
            done += [type(step).__name__ for step in steps]
            idle = 0 if steps else idle + 1
            assert len(done) < 60, done
        return done


@pytest.fixture
async def api():
    return SecretsApi()


@pytest.fixture
async def operator(api):
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", api.handle)
    async with TestServer(application) as server:
        connection = Connection(str(server.make_url("/")), token="t")
        async with Cluster(connection, 5.0, lambda: None) as cluster:
            yield Operator(cluster)


def leaf(api, role):
    data = {k: base64.b64decode(v) for k, v in api.held[names.certificate_secret("m", role)]["data"].items()}
    return certificates.read_leaf(data, role.value, "m", "ns")


async def test_secrets_are_made_owned_and_then_only_read(api, operator):
    assert await operator.quiet() == ["MakeAuthority", "IssueLeaf", "IssueLeaf", "IssueLeaf"]
    assert set(api.held) == {names.authority_secret("m"), *(names.certificate_secret("m", role) for role in PodRole)}
    for item in api.held.values():
        (reference,) = item["metadata"]["ownerReferences"]
        assert (reference["uid"], reference["controller"]) == (UID, True)
        assert item["metadata"]["labels"]["team"] == "search"
    api.calls.clear()
    await operator.turn()
    assert {method for method, _ in api.calls} == {"GET"}
    assert "" not in {name for _, name in api.calls}  # never a list


async def test_a_ca_is_replaced_in_the_secrets_themselves(api, operator):
    await operator.quiet()
    before = operator.keyring.seen().current.id
    await operator.applier.obey(Certify(BeginRotation(before, operator.now + Lives().authority)))
    done = await operator.quiet()
    assert done == ["SetTrust"] * 3 + ["IssueLeaf"] * 3 + ["SetTrust"] * 3 + ["FinishRotation"]
    after = operator.keyring.seen().current.id
    assert after != before
    for role in PodRole:
        assert (leaf(api, role).issuer, set(leaf(api, role).trusted)) == (after, {after})
    assert "next.key" not in api.held[names.authority_secret("m")]["data"]


@pytest.mark.parametrize("half", [1, 2, 3, 5, 7, 9])
async def test_another_operator_goes_on_wherever_the_first_one_was_killed(api, operator, half):
    await operator.quiet()
    before = operator.keyring.seen().current.id
    await operator.applier.obey(Certify(BeginRotation(before, operator.now + Lives().authority)))
    left = half
    while left:
        for step in rotate(await operator.read(), operator.now, Lives())[:left]:
            await operator.applier.obey(Certify(step))
            left -= 1
        operator.now += SETTLE_S
        if not rotate(await operator.read(), operator.now, Lives()):
            break
    second = Operator(operator.cluster)
    second.now = operator.now
    await second.quiet()
    after = second.keyring.seen()
    assert after.next is None
    assert {(found.issuer, found.trusted) for found in after.leaves.values()} == {
        (after.current.id, frozenset({after.current.id}))
    }
    assert after.current.id != before


@pytest.mark.parametrize(
    ("what", "kept"),
    [("delete", False), ("nonsense", False), ("other key", False), ("not base64", False), ("extra", True)],
)
@pytest.mark.parametrize("whose", ["ca", "decode"])
async def test_a_secret_that_somebody_deletes_or_spoils_is_made_anew(api, operator, whose, what, kept):
    await operator.quiet()
    name = names.authority_secret("m") if whose == "ca" else names.certificate_secret("m", PodRole.DECODE)
    before = operator.keyring.seen()
    match what:
        case "delete":
            del api.held[name]
        case "nonsense":
            api.spoil(name, tls_crt=b"nonsense")
        case "other key":
            other = certificates.new_authority("m", "ns", time.time() + 1e6)
            api.spoil(name, tls_key=other.key)
        case "not base64":
            api.spoil(name)
            api.held[name]["data"] = {"tls.crt": "%%%"}
        case "extra":
            api.spoil(name, more=b"of it")
    await operator.quiet()
    after = operator.keyring.seen()
    assert {found.issuer for found in after.leaves.values()} == {after.current.id}
    assert all(found.trusted == {after.current.id} for found in after.leaves.values())
    assert (after.current == before.current) is (kept or whose == "decode")


async def test_what_changed_since_it_was_read_is_left_for_another_look(api, operator):
    await operator.quiet()
    seen = operator.keyring.seen()
    api.spoil(names.certificate_secret("m", PodRole.DECODE), more=b"somebody was here")
    step = IssueLeaf(PodRole.DECODE, seen.current.id, frozenset({seen.current.id}), operator.now + 1e6)
    assert (await operator.applier.obey(Certify(step))).stale is not None
    gone = IssueLeaf(PodRole.DECODE, "0" * 16, frozenset({seen.current.id}), operator.now + 1e6)
    assert await operator.applier.obey(Certify(gone)) == STALE
    assert await operator.applier.obey(Certify(BeginRotation("0" * 16, operator.now))) == STALE


async def test_one_secret_that_cannot_be_changed_keeps_nothing_else_from_being_done(api, operator, caplog):
    await operator.quiet()
    api.held[names.certificate_secret("m", PodRole.DECODE)]["immutable"] = True
    seen = await operator.read()
    step = IssueLeaf(PodRole.DECODE, seen.current.id, frozenset({seen.current.id}), operator.now + 1e6)
    outcome = await operator.applier.obey(Certify(step))
    assert outcome.idle
    assert "immutable" in caplog.text


async def test_the_operators_own_leaf_is_signed_by_whom_everybody_trusts_and_renewed_in_time(api, operator):
    assert operator.keyring.identity() is None
    await operator.quiet()
    before = operator.keyring.identity()
    assert before.name.peer is Peer.OPERATOR
    assert operator.keyring.identity() is before
    old = operator.keyring.seen().current.id
    await operator.applier.obey(Certify(BeginRotation(old, operator.now + Lives().authority)))
    while steps := await operator.turn():
        assert "FinishRotation" not in [type(step).__name__ for step in steps]
        told = operator.keyring.identity()
        # All roles believe it, and it believes all of them.
        leaves = (await operator.read()).leaves
        assert all(found.issuer in told.trusted for found in leaves.values())
    await operator.quiet()
    assert operator.keyring.identity().trusted == (operator.keyring.seen().current.id,)
    held = operator.keyring.identity()
    operator.now += OWN_LIFE_S * 0.6
    assert operator.keyring.identity().not_after > held.not_after


async def test_nothing_secret_is_in_what_is_printed(api, operator):
    await operator.quiet()
    assert "PRIVATE" not in repr(operator.keyring)
