"""A CA and its leaves, held against the standard library's TLS."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta

import pytest

from sluice_operator import certificates
from sluice_operator.certificates import Issued, issue, new_authority, server_name


@pytest.fixture(scope="module")
def authority():
    return new_authority("m", "ns")


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
    server, client = (issue(authority, role, "m", "ns") for role in ("prefill", "decode"))
    name = server_name("prefill", "m", "ns")
    peer = handshake(tmp_path, server, client, authority.certificate, name)
    assert peer["subjectAltName"] == (("DNS", server_name("decode", "m", "ns")),)


def test_another_role_and_another_deployment_are_refused(tmp_path, authority):
    gateway, client = (issue(authority, role, "m", "ns") for role in ("gateway", "decode"))
    with pytest.raises(ssl.SSLError):
        handshake(tmp_path, gateway, client, authority.certificate, server_name("prefill", "m", "ns"))
    other = issue(new_authority("m", "other"), "prefill", "m", "ns")
    with pytest.raises(ssl.SSLError):
        handshake(tmp_path, other, client, authority.certificate, server_name("prefill", "m", "ns"))


def test_what_has_run_out_is_refused(tmp_path, authority):
    old = datetime.now(UTC) - certificates.LEAF_LIFE - timedelta(days=1)
    server, client = issue(authority, "prefill", "m", "ns", old), issue(authority, "decode", "m", "ns")
    with pytest.raises(ssl.SSLError):
        handshake(tmp_path, server, client, authority.certificate, server_name("prefill", "m", "ns"))


def test_a_secret_is_read_again(authority):
    leaf = issue(authority, "decode", "m", "ns")
    assert Issued.read(leaf.data()) == leaf
    assert leaf.authority == authority.certificate
    with pytest.raises(KeyError):
        Issued.read({"tls.crt": b""})
