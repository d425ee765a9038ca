"""Secrets of certificates in a real API server: a CA is replaced in steps, and at every moment all roles believe each
other by what their Secrets hold then. What pods do with them: tests/stack/test_tls.py."""

from __future__ import annotations

import time

import pytest
from operator_process import OperatorProcess

from sluice_operator import names
from sluice_operator.keys import certificates, keyring
from sluice_operator.live.cluster import KINDS
from sluice_operator.names import PodRole
from sluice_runtime.tls.identity import Identity

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

# Of a CA, of a leaf, and of the wait between two steps; the operator looks every second where nothing moves.
LIVES = "--lives=60,600,3"
OPTIONS = (LIVES, "--constant=live.reconcile.QUIET_S=1", "--constant=live.reconcile.AWAITED_S=1")
READY_S = 240.0
ROLES = {names.certificate_secret("m", role): role for role in PodRole}


def read(client, namespace):
    """(id of the CA, of the one that is to come or "", leaf by role), of one moment."""
    secrets = {item["metadata"]["name"]: item for item in client.items(KINDS["Secret"].path(namespace))}
    if not ROLES.keys() | {names.authority_secret("m")} <= secrets.keys():
        return None
    data = {name: keyring.decode(item) for name, item in secrets.items()}
    told = certificates.read_authorities(data[names.authority_secret("m")])
    leaves = {role: certificates.read_leaf(data[name], role.value, "m", namespace) for name, role in ROLES.items()}
    for name in ROLES:
        Identity.of(data[name], name)  # as a pod reads it: a handshake with itself
    return told.current.id, told.next.id if told.next else "", leaves


def until(client, namespace, is_so):
    """What was seen until then, each of it once. Whoever is shown any leaf believes it, in all of it."""
    seen, deadline = [], time.monotonic() + READY_S
    while not (seen and is_so(*seen[-1])):
        assert time.monotonic() < deadline, seen[-1:]
        if (told := read(client, namespace)) is not None and told not in seen[-1:]:
            seen.append(told)
            leaves = told[2]
            assert all(a.issuer in b.trusted for a in leaves.values() for b in leaves.values()), told
        time.sleep(0.05)
    return seen


def is_narrow(current, following, leaves):
    return not following and all(leaf.trusted.keys() == {leaf.issuer} == {current} for leaf in leaves.values())


@pytest.mark.slow
def test_a_ca_is_replaced_while_every_role_believes_every_other(plane, client, served, namespace):
    with OperatorProcess(plane, f"op-{namespace}", namespace, *OPTIONS) as operator:
        served.create()
        first = until(client, namespace, is_narrow)[-1][0]
        seen = until(client, namespace, lambda *told: told[0] != first and is_narrow(*told))
        assert operator.status()["failures"] == {}
    follower = seen[-1][0]
    stages = [
        (
            current,
            following,
            {leaf.issuer for leaf in leaves.values()},
            {id_ for x in leaves.values() for id_ in x.trusted},
        )
        for current, following, leaves in seen
    ]
    both = {first, follower}
    # Everybody trusts the new one before it has signed anything, and it has signed everything before the old one goes.
    assert (first, follower, {first}, both) in stages
    assert (first, follower, {follower}, both) in stages
    assert [s for s in stages if s[2] == both and s[3] != both] == []
    served.until("Ready", "True")


def test_a_ca_whose_secret_is_deleted_is_replaced_and_nobody_stops_believing(plane, client, served, namespace):
    with OperatorProcess(plane, f"op-{namespace}", namespace, LIVES.replace("60,", "6000,"), *OPTIONS[1:]) as operator:
        served.create()
        first = until(client, namespace, is_narrow)[-1][0]
        client.delete(KINDS["Secret"].path(namespace, names.authority_secret("m")))
        seen = until(client, namespace, lambda *told: told[0] != first and is_narrow(*told))
        assert operator.status()["failures"] == {}
    assert {leaf.issuer for _, _, leaves in seen for leaf in leaves.values()} == {first, seen[-1][0]}
