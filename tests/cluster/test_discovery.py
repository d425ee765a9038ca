"""A gateway's discovery against the real API server: with the rights that the operator renders, and no others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from cluster_deployment import Served
from operator_process import OperatorProcess

from sluice_gateway.routing.discover import Discovery, discovering, parse_target
from sluice_gateway.routing.slice_api import HttpSliceApi
from sluice_operator.render import ports
from sluice_runtime.cluster_connection import from_pod

pytestmark = [pytest.mark.process, pytest.mark.timeout(280)]


@pytest.fixture
def served(client, namespace, nodes, crd):
    return Served(client, namespace)


@pytest.fixture
def operator(plane, namespace, crd):
    with OperatorProcess(plane, f"op-{namespace}", namespace) as running:
        yield running


def account_folder(client, plane, namespace, folder):
    """What a kubelet mounts into a pod of the gateway's account."""
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/m-gateway"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
    client.until(path, bool)
    token = client.create(f"{path}/token", request)["status"]["token"]
    folder.mkdir()
    (folder / "token").write_text(token)
    (folder / "namespace").write_text(namespace)
    (folder / "ca.crt").write_bytes((plane.folder / "ca.crt").read_bytes())
    return folder


@asynccontextmanager
async def following(connection, target) -> AsyncIterator[tuple[Discovery, list]]:
    fleets: list = []
    async with HttpSliceApi(connection, target) as api:
        discovery = Discovery(api, fleets.append)
        async with discovering(discovery):
            yield discovery, fleets


async def until(is_so, what, timeout_s=90.0):
    async with asyncio.timeout(timeout_s):
        while not is_so():  # noqa: ASYNC110 - the other end is a real server
            await asyncio.sleep(0.05)


def addresses(fleets) -> set[str]:
    return {member.address for member in fleets[-1].members} if fleets else set()


async def test_engines_are_seen_before_they_are_ready_and_until_they_are_gone(
    plane, client, operator, served, namespace, tmp_path
):
    slow = {"metadata": {"annotations": {"sluice.test/start-delay": "3600s"}}}
    await asyncio.to_thread(served.create, prefill={"replicas": 1}, decode={"replicas": 2, "template": slow})
    folder = await asyncio.to_thread(account_folder, client, plane, namespace, tmp_path / "account")
    host, port = plane.url.removeprefix("https://").split(":")
    connection = from_pod(host, port, folder)
    async with following(connection, parse_target(f"{namespace}/m-prefill,m-decode")) as (discovery, fleets):
        await until(lambda: len(addresses(fleets)) == 3, "all engines")
        pods = await asyncio.to_thread(served.engines)
        assert addresses(fleets) == {f"{pod['status']['podIP']}:{ports.ENGINE}" for pod in pods}
        ready = [
            pod for pod in pods for c in pod["status"]["conditions"] if c["type"] == "Ready" and c["status"] == "True"
        ]
        assert len(ready) <= 1
        await asyncio.to_thread(served.change, decode={"replicas": 1})
        await until(lambda: len(addresses(fleets)) == 2, "one left")
        await asyncio.to_thread(served.change, decode={"replicas": 3})
        await until(lambda: len(addresses(fleets)) == 4, "two came")
        pods = await asyncio.to_thread(served.engines)
        assert addresses(fleets) == {f"{pod['status']['podIP']}:{ports.ENGINE}" for pod in pods}
        assert discovery.trouble == ""


async def test_slices_of_other_services_other_families_and_broken_ones_do_no_harm(
    plane, client, operator, served, namespace, tmp_path
):
    await asyncio.to_thread(served.create)
    folder = await asyncio.to_thread(account_folder, client, plane, namespace, tmp_path / "account")
    host, port = plane.url.removeprefix("https://").split(":")
    slices = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"

    def put(name, service, family, *hosts):
        body = {
            "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
            "addressType": family,
            "ports": [{"name": "engine", "port": 7000}],
            "endpoints": [{"addresses": [host]} for host in hosts],
        }
        client.create(slices, body)

    async with following(from_pod(host, port, folder), parse_target(f"{namespace}/m-prefill,m-decode")) as (_, fleets):
        await until(lambda: len(addresses(fleets)) == 2, "all engines")
        before = addresses(fleets)
        await asyncio.to_thread(put, "theirs", "another", "IPv4", "10.1.1.1")
        await asyncio.to_thread(put, "names", "m-decode", "FQDN", "engine.example")
        await asyncio.to_thread(put, "six", "m-decode", "IPv6", "fd00::7")
        await asyncio.to_thread(put, "more", "m-decode", "IPv4", "10.1.1.2", "10.1.1.3")
        wanted = before | {"[fd00::7]:7000", "10.1.1.2:7000", "10.1.1.3:7000"}
        await until(lambda: addresses(fleets) == wanted, "ours")
        seen = len(fleets)
        # It moves: told of twice for a while, then in the new place only.
        await asyncio.to_thread(put, "new", "m-decode", "IPv4", "10.1.1.2")
        await asyncio.to_thread(client.delete, f"{slices}/more")
        await until(lambda: addresses(fleets) == wanted - {"10.1.1.3:7000"}, "moved")
        assert not [fleet for fleet in fleets[seen:] if "10.1.1.2:7000" not in {m.address for m in fleet.members}]


async def test_what_the_account_may_not_see_is_named_and_nothing_else_is_open_to_it(
    plane, client, operator, served, namespace, tmp_path
):
    await asyncio.to_thread(served.create)
    folder = await asyncio.to_thread(account_folder, client, plane, namespace, tmp_path / "account")
    host, port = plane.url.removeprefix("https://").split(":")
    async with following(from_pod(host, port, folder), parse_target("default/kubernetes")) as (discovery, fleets):
        await until(lambda: "get, list and watch endpointslices in namespace default" in discovery.trouble, "named")
        assert fleets == []
    for path in ("pods", "secrets", "services"):
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": f"system:serviceaccount:{namespace}:m-gateway",
                "resourceAttributes": {"namespace": namespace, "verb": "list", "resource": path},
            },
        }
        told = await asyncio.to_thread(client.create, "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        assert told["status"]["allowed"] is False
