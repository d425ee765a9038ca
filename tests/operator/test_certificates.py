"""A CA and its leaves, held against the standard library's TLS, which shares no code with what made them."""

from __future__ import annotations

import ssl
import time
from dataclasses import replace

import pytest

from sluice_operator.keys import certificates
from sluice_operator.keys.certificates import (
    Authorities,
    NotOurs,
    issue,
    new_authority,
    read_authorities,
    read_leaf,
    server_name,
)
from sluice_runtime.tls.identity import Identity

LATER = time.time() + 1000.0


@pytest.fixture(scope="module")
def authority():
    return new_authority("m", "ns", LATER)


def leaf(authority, role, name="m", namespace="ns", until=LATER, trusted=None):
    bundle = [(a or authority).certificate for a in trusted or [authority]]
    return issue(authority, bundle, role, name, namespace, until)


def handshake(tmp_path, server, client, trusted, name):
    """Both sides in memory, each with its certificate. Raises ssl.SSLError."""
    contexts = []
    for side, (mine, purpose) in enumerate(((server, ssl.PROTOCOL_TLS_SERVER), (client, ssl.PROTOCOL_TLS_CLIENT))):
        context = ssl.SSLContext(purpose)
        (tmp_path / f"{side}.pem").write_bytes(mine.certificate + mine.key)
        context.load_cert_chain(tmp_path / f"{side}.pem")
        context.load_verify_locations(cadata=trusted.decode())
        context.verify_mode = ssl.CERT_REQUIRED
        contexts.append(context)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        contexts[0].wrap_bio(there, back, server_side=True),
        contexts[1].wrap_bio(back, there, server_hostname=name),
    ]
    done = set()
    for _ in range(10):
        for end in ends:
            try:
                end.do_handshake()
                done.add(end)
            except ssl.SSLWantReadError:
                pass
        if len(done) == 2:
            return ends[0].getpeercert()
    raise AssertionError("no end of the handshake")


def test_peers_of_one_deployment_know_each_other_by_role(tmp_path, authority):
    server, client = (leaf(authority, role) for role in ("prefill", "decode"))
    peer = handshake(tmp_path, server, client, authority.certificate, server_name("prefill", "m", "ns"))
    assert peer["subjectAltName"] == (("DNS", "decode.m.ns.sluice.dev"), ("DNS", "engine.m.ns.sluice.dev"))


def test_another_role_and_another_deployment_are_refused(tmp_path, authority):
    gateway, client = (leaf(authority, role) for role in ("gateway", "decode"))
    with pytest.raises(ssl.SSLError, match="Hostname mismatch"):
        handshake(tmp_path, gateway, client, authority.certificate, server_name("prefill", "m", "ns"))
    other = leaf(new_authority("m", "other", LATER), "prefill")
    with pytest.raises(ssl.SSLError, match="unable to get local issuer"):
        handshake(tmp_path, other, client, authority.certificate, server_name("prefill", "m", "ns"))


def test_what_has_run_out_is_refused(tmp_path, authority):
    server, client = leaf(authority, "prefill", until=time.time() - 1), leaf(authority, "decode")
    with pytest.raises(ssl.SSLError, match="expired"):
        handshake(tmp_path, server, client, authority.certificate, server_name("prefill", "m", "ns"))


def test_a_leaf_never_outlives_who_signed_it(authority):
    assert read_leaf(leaf(authority, "decode", until=LATER * 2).data(), "decode", "m", "ns").not_after == int(LATER)


@pytest.mark.parametrize("turned", [False, True])
def test_two_cas_of_one_deployment_in_one_bundle_are_told_apart(tmp_path, authority, turned):
    """In either order: a library that looks for an issuer by its name takes the first one that it finds."""
    second = new_authority("m", "ns", LATER)
    bundle = b"".join(a.certificate for a in ((second, authority) if turned else (authority, second)))
    name = server_name("prefill", "m", "ns")
    for signs_server, signs_client in ((authority, second), (second, authority), (second, second)):
        assert handshake(tmp_path, leaf(signs_server, "prefill"), leaf(signs_client, "decode"), bundle, name)


def test_secrets_are_read_again(authority):
    second = new_authority("m", "ns", LATER)
    for told in (Authorities(authority), Authorities(authority, second)):
        assert read_authorities(told.data()) == told
    read = read_leaf(leaf(second, "decode", trusted=[authority, second]).data(), "decode", "m", "ns")
    assert (read.issuer, set(read.trusted)) == (second.id, {authority.id, second.id})


def test_engines_and_the_operator_call_a_ca_the_same(authority):
    second = new_authority("m", "ns", LATER)
    told = leaf(second, "decode", trusted=[authority, second])
    identity = Identity.of(told.data())
    assert set(identity.trusted) == {authority.id, second.id}
    assert (str(identity.name), identity.not_after) == (server_name("decode", "m", "ns"), int(LATER))


@pytest.mark.parametrize("spoiled", ["tls.crt", "tls.key", "ca.crt"])
@pytest.mark.parametrize("data", [None, b"", b"nonsense", "half", "other"])
def test_a_spoiled_secret_is_none_of_ours_whatever_is_wrong_with_it(authority, spoiled, data):
    def broken(good, other):
        told = dict(good)
        made = {"half": good[spoiled][: len(good[spoiled]) // 2], "other": other[spoiled], None: b""}
        told[spoiled] = made.get(data, data)
        return told

    stranger = new_authority("m", "ns", LATER)
    with pytest.raises(NotOurs):
        read_leaf(broken(leaf(authority, "decode").data(), leaf(stranger, "decode").data()), "decode", "m", "ns")
    if spoiled != "ca.crt":
        with pytest.raises(NotOurs):
            read_authorities(broken(Authorities(authority).data(), Authorities(stranger).data()))


def test_a_secret_of_somebody_else_is_none_of_ours(authority):
    for role, name, namespace in (("prefill", "m", "ns"), ("decode", "n", "ns"), ("decode", "m", "other")):
        with pytest.raises(NotOurs, match=r"tls\.crt is of"):
            read_leaf(leaf(authority, role, name, namespace).data(), "decode", "m", "ns")


def test_a_ca_to_come_that_makes_no_sense_is_as_if_it_were_not_there(authority):
    second = new_authority("m", "ns", LATER)
    data = Authorities(authority, replace(second, key=authority.key)).data()
    assert read_authorities(data) == Authorities(authority)


def test_nothing_made_by_a_clock_that_runs_ahead_is_not_valid_yet(tmp_path):
    ahead = time.time() + 50 * 365 * 86400
    authority = new_authority("m", "ns", ahead)
    server, client = (leaf(authority, role, until=ahead) for role in ("prefill", "decode"))
    assert handshake(tmp_path, server, client, authority.certificate, server_name("prefill", "m", "ns"))
    assert certificates.BEGIN.timestamp() < time.time()
