"""Who we are, from files that change under us: the identity of a process and its keeper."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from tls_folder import TlsFolder, authority, leaf

from sluice_protocol.v1 import engine_pb2, fleet_pb2, source_pb2
from sluice_runtime import log
from sluice_runtime.health.exposition import exposition
from sluice_runtime.health.status import certificate_of
from sluice_runtime.tls import keeper as keepers
from sluice_runtime.tls.identity import IdentityInvalid, read_identity
from sluice_runtime.tls.keeper import DAY_S, NEAR_S, IdentityKeeper
from sluice_runtime.tls.peers import CALLERS, Peer, PeerName, objection

CA, OTHER = authority(), authority()
DOMAIN = "m.ns.sluice.dev"


@pytest.fixture
def folder(tmp_path):
    return TlsFolder(tmp_path / "tls", leaf(CA, "decode").data())


@pytest.fixture
def keeper(folder, monkeypatch):
    monkeypatch.setattr(keepers, "LOOK_S", 0.0)
    return IdentityKeeper(folder.path, Peer.DECODE)


@pytest.fixture
def said(monkeypatch):
    told = []
    for level in ("info", "warning"):
        monkeypatch.setattr(log, level, lambda event, **fields: told.append((event, fields)))
    return lambda: told


def test_an_identity_is_what_the_certificate_says(folder):
    told = read_identity(folder.path)
    assert told.name == PeerName(Peer.DECODE, DOMAIN)
    assert told.trusted == (CA.id,)
    assert "PRIVATE" not in repr(told)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tls.crt": None}, "tls.crt"),
        ({"ca.crt": None}, "ca.crt"),
        ({"tls.key": b""}, "tls.key"),
        ({"tls.crt": b"nonsense"}, "tls.crt"),
        ({"ca.crt": b"\xff\xfe"}, "ca.crt"),
        ({"tls.key": leaf(CA, "decode").key}, "mismatch"),
        ({"ca.crt": OTHER.certificate}, "certificate verify failed"),
        (leaf(CA, "nobody").data(), "ROLE.DOMAIN"),
    ],
)
def test_what_is_no_identity_is_refused_with_the_file_and_the_remedy(tmp_path, change, words):
    data = {name: content for name, content in (leaf(CA, "decode").data() | change).items() if content is not None}
    with pytest.raises(IdentityInvalid, match=words) as caught:
        read_identity(TlsFolder(tmp_path / "t", data).path)
    assert str(tmp_path) in str(caught.value)


def test_a_key_with_a_password_asks_nobody(tmp_path):
    locked = b"-----BEGIN ENCRYPTED PRIVATE KEY-----\n" + leaf(CA, "decode").key.split(b"\n", 1)[1].replace(
        b"END PRIVATE", b"END ENCRYPTED PRIVATE"
    )
    with pytest.raises(IdentityInvalid):
        read_identity(TlsFolder(tmp_path / "t", leaf(CA, "decode").data() | {"tls.key": locked}).path)


def test_plain_files_will_do(tmp_path):
    for name, content in leaf(CA, "decode").data().items():
        (tmp_path / name).write_bytes(content)
    assert read_identity(tmp_path).name.peer is Peer.DECODE


def test_somebody_elses_certificate_is_refused_at_the_start(folder):
    with pytest.raises(IdentityInvalid, match="is of the decode, this is the prefill"):
        IdentityKeeper(folder.path, Peer.PREFILL)


def test_a_new_certificate_is_taken_when_the_volume_changes(folder, keeper, said):
    assert not keeper.look()
    fresh = leaf(OTHER, "decode", trusted=[CA, OTHER])
    folder.write(fresh.data())
    assert keeper.look()
    assert keeper.current.certificate == fresh.certificate
    assert keeper.describe()["counters"] == {"changed": 1}
    assert said()[-1][0] == "certificate changed"
    assert not keeper.look()


@pytest.mark.parametrize(
    "bad",
    [
        {"tls.key": leaf(CA, "decode").key},
        {"ca.crt": b""},
        {"tls.crt": leaf(CA, "decode").certificate[:200]},
        leaf(CA, "prefill").data(),
        leaf(CA, "decode", name="other").data(),
        leaf(CA, "decode", until=time.time() - 5).data(),
    ],
    ids=["other key", "no CA", "half a certificate", "another role", "another deployment", "expired"],
)
def test_what_is_no_good_leaves_the_old_one_and_is_said_once(folder, keeper, said, bad):
    before = keeper.current
    folder.write(leaf(CA, "decode").data() | bad)
    assert [keeper.look() for _ in range(3)] == [False] * 3
    assert keeper.current is before
    assert keeper.describe()["counters"] == {"kept": 1}
    assert [event for event, _ in said()].count("certificate kept") == 1
    assert str(folder.path) in keeper.describe()["kept_because"]
    folder.write(leaf(CA, "decode").data())
    assert keeper.look()
    assert keeper.describe()["kept_because"] == ""


def test_a_change_that_goes_on_while_it_is_read_is_looked_at_again(folder, keeper, monkeypatch):
    """Half of two lives of the Secret can be a valid whole: the CAs of one, the rest of the other."""
    read, final = keepers.read_identity, leaf(CA, "decode")
    folder.write(leaf(CA, "decode").data())

    def overtaken(path):
        told = read(path)
        folder.write(final.data())
        return told

    monkeypatch.setattr(keepers, "read_identity", overtaken)
    assert not keeper.look()
    monkeypatch.setattr(keepers, "read_identity", read)
    assert keeper.look()
    assert keeper.current.certificate == final.certificate


def test_one_that_has_expired_is_shown_all_the_same_and_replaced_by_any_that_lasts_longer(folder, monkeypatch):
    monkeypatch.setattr(keepers, "LOOK_S", 0.0)
    folder.write(leaf(CA, "decode", until=time.time() - 500).data())
    keeper = IdentityKeeper(folder.path, Peer.DECODE)
    assert keeper.left_s < 0
    folder.write(leaf(CA, "decode", until=time.time() - 50).data())
    assert keeper.look()


def test_it_is_said_that_the_end_is_near_once_a_day_and_that_it_has_come(folder, said, monkeypatch):
    monkeypatch.setattr(keepers, "LOOK_S", 0.0)
    now = [time.time()]
    keeper = IdentityKeeper(folder.path, Peer.DECODE, wall=lambda: now[0])
    end = keeper.current.not_after
    for left in (NEAR_S + 1, NEAR_S - 1, NEAR_S - 2, NEAR_S - DAY_S - 2, -1.0):
        now[0] = end - left
        keeper.look()
    events = [event for event, _ in said()]
    assert events == [
        "certificate read",
        "certificate expires soon",
        "certificate expires soon",
        "certificate has expired",
    ]


def test_metrics_say_how_long_it_lasts_also_when_its_owner_stands_still(keeper):
    told = certificate_of(keeper.describe(), keeper.current.not_after - 77.0)
    status = {"name": "d", "role": "decode", "verdict": "idle", "rows": [], "memory_bytes": {}, "certificate": told}
    text = exposition((), status).decode()
    assert f'sluice_certificate_left_seconds{{name="decode.{DOMAIN}",role="decode",service="d"}} 77.0' in text
    assert f'sluice_certificate_authority{{authority="{CA.id}",role="decode",service="d"}} 1.0' in text
    assert certificate_of(None, 0.0) is None


def test_every_call_that_there_is_is_somebodys():
    files = (engine_pb2, fleet_pb2, source_pb2)
    services = [service for file in files for service in file.DESCRIPTOR.services_by_name.values()]
    calls = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    assert calls <= CALLERS.keys()
    assert all(CALLERS.values())


def test_a_call_is_for_those_of_the_same_deployment_whose_it_is():
    generate = "/sluice.v1.Engine/Generate"
    assert objection(generate, [f"gateway.{DOMAIN}"], DOMAIN) == ""
    for names in ([], ["gateway.other.ns.sluice.dev"], [f"decode.{DOMAIN}"], ["nonsense"], [f"gatewayx.{DOMAIN}"]):
        told = objection(generate, names, DOMAIN)
        assert f"{generate} is for the gateway of {DOMAIN}" in told
        assert (names or ["no name"])[0] in told
    assert "for no role" in objection("/sluice.v1.Engine/New", [f"operator.{DOMAIN}"], DOMAIN)


def test_identities_of_the_same_bytes_are_equal(folder):
    told = read_identity(folder.path)
    assert read_identity(folder.path) == told != replace(told, not_after=0.0)
