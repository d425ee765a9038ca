"""EndpointSlices as values: who is there, whatever the slices look like."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_gateway.routing.discover import parse_target
from sluice_gateway.routing.slices import LINGER_S, Endpoint, Present, addresses_of, read_slice


def make_slice(*pods: tuple[str, str], family: str = "IPv4", port: int = 7000, **more: Any) -> dict[str, Any]:
    endpoints = [{"addresses": [host], "targetRef": {"kind": "Pod", "uid": uid}} for uid, host in pods]
    return {"addressType": family, "ports": [{"name": "engine", "port": port}], "endpoints": endpoints} | more


def addresses(*slices: dict[str, Any], prefer_v6: bool = False) -> set[str]:
    return set(addresses_of(map(read_slice, slices), prefer_v6))


def test_all_slices_of_a_service_count():
    assert addresses(make_slice(("a", "10.0.0.1")), make_slice(("b", "10.0.0.2"))) == {"10.0.0.1:7000", "10.0.0.2:7000"}


def test_a_pod_that_moves_from_one_slice_to_another_is_one_engine():
    assert addresses(make_slice(("a", "10.0.0.1")), make_slice(("a", "10.0.0.1"))) == {"10.0.0.1:7000"}


def test_ipv6_addresses_have_brackets():
    assert addresses(make_slice(("a", "fd00::1"), family="IPv6")) == {"[fd00::1]:7000"}


@pytest.mark.parametrize(("prefer_v6", "wanted"), [(False, "10.0.0.1:7000"), (True, "[fd00::1]:7000")])
def test_a_pod_with_addresses_of_both_families_is_one_engine(prefer_v6, wanted):
    both = make_slice(("a", "10.0.0.1")), make_slice(("a", "fd00::1"), family="IPv6")
    assert addresses(*both, prefer_v6=prefer_v6) == {wanted}


@pytest.mark.parametrize(
    "conditions", [{"ready": False}, {"ready": False, "serving": False, "terminating": True}, None]
)
def test_who_is_not_ready_is_there_all_the_same(conditions):
    told = make_slice(("a", "10.0.0.1"))
    told["endpoints"][0]["conditions"] = conditions
    assert addresses(told) == {"10.0.0.1:7000"}


def test_without_a_name_for_it_the_only_port_is_taken_and_of_several_the_named_one():
    nameless = make_slice(("a", "10.0.0.1"), ports=[{"port": 9000}])
    several = make_slice(("b", "10.0.0.2"), ports=[{"name": "probe", "port": 1}, {"name": "engine", "port": 2}])
    unclear = make_slice(("c", "10.0.0.3"), ports=[{"name": "x", "port": 1}, {"name": "y", "port": 2}])
    assert addresses(nameless, several, unclear) == {"10.0.0.1:9000", "10.0.0.2:2"}


def test_endpoints_that_are_no_pods_are_told_apart_by_their_addresses():
    told = make_slice(("", "10.0.0.1"), ("", "10.0.0.2"))
    for endpoint in told["endpoints"]:
        del endpoint["targetRef"]
    assert addresses(told) == {"10.0.0.1:7000", "10.0.0.2:7000"}


@pytest.mark.parametrize(
    "broken",
    [
        None,
        [],
        "slice",
        {},
        make_slice(("a", "engine.example"), family="FQDN"),
        make_slice(("a", "10.0.0.1"), family="IPv6"),
        make_slice(("a", "not an address")),
        make_slice(("a", "fe80::1%eth0"), family="IPv6"),
        make_slice(("a", "10.0.0.1"), port=0),
        make_slice(("a", "10.0.0.1"), port=70000),
        make_slice(("a", "10.0.0.1"), ports=None),
        make_slice(("a", "10.0.0.1"), ports=["engine"]),
        make_slice(endpoints=None),
        make_slice(endpoints=[None, {}, {"addresses": []}, {"addresses": None}, {"addresses": [7]}]),
    ],
)
def test_what_makes_no_sense_names_nobody(broken):
    assert read_slice(broken) == ()


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["addressType", "ports", "endpoints", "addresses", "targetRef", "uid", "port", "name"]), inner
    ),
    max_leaves=20,
)  # fmt: skip


@given(json)
def test_no_slice_raises(item):
    assert isinstance(read_slice(item), tuple)


def test_an_address_that_is_told_of_no_more_stays_a_moment_and_one_that_comes_back_never_left():
    here = Present().then(frozenset({"a", "b"}), 0.0)
    moving = here.then(frozenset({"a"}), 1.0)
    assert moving.addresses == {"a", "b"}
    assert moving.then(frozenset({"a", "b"}), 1.5) == here
    assert moving.then(frozenset({"a"}), 1.0 + LINGER_S).addresses == {"a"}
    # Its time runs from when it was missed first.
    again = moving.then(frozenset({"a"}), 1.0 + LINGER_S / 2)
    assert again.missing == (("b", 1.0),)


@given(st.lists(st.frozensets(st.sampled_from("abc")), max_size=8))
def test_whoever_was_told_of_last_is_there_and_nobody_stays_for_ever(history):
    present, now = Present(), 0.0
    for told in history:
        present, now = present.then(told, now), now + LINGER_S / 3
        assert told <= present.addresses
    last = history[-1] if history else frozenset()
    assert present.then(last, now).then(last, now + 2 * LINGER_S).addresses == last


def test_where_to_look_is_a_namespace_and_services():
    target = parse_target("ns/m-prefill,m-decode")
    assert target.selector == "kubernetes.io/service-name in (m-prefill,m-decode)"
    assert target.namespace == "ns"


@pytest.mark.parametrize("text", ["", "ns", "ns/", "/svc", "ns/a/b", "ns/,"])
def test_a_place_that_is_none_is_refused_with_the_remedy(text):
    with pytest.raises(ValueError, match="say NAMESPACE/SERVICE"):
        parse_target(text)


def test_the_endpoint_of_a_slice():
    assert read_slice(make_slice(("a", "10.0.0.1"))) == (Endpoint("a", "10.0.0.1", 7000),)
