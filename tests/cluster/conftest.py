"""One control plane for all tests that do not break it; each of them works in a namespace of its own."""

from __future__ import annotations

import itertools
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from cluster_deployment import Served
from cluster_state import state_of
from cluster_tools import why_missing
from control_plane import ControlPlane
from fake_fleet import FakeFleet
from operator_process import FORGE, OperatorProcess

_NUMBERS = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long begins first, so that no worker is left with it in the end."""
    here = Path(__file__).parent
    mine = [item for item in items if here in item.path.parents]
    for item in mine:
        item.add_marker(pytest.mark.cluster)
    ordered = iter(sorted(mine, key=lambda item: item.get_closest_marker("slow") is None))
    items[:] = [next(ordered) if here in item.path.parents else item for item in items]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Where a test fails, its operators say where they are, before they are ended, and what is in its namespace."""
    report = yield
    if report.when == "call" and report.failed:
        for operator in list(OperatorProcess.living):
            operator.say_where()
        mine = item.funcargs if isinstance(item, pytest.Function) else {}
        if "namespace" in mine:
            report.sections.append(("what was there", state_of(mine["client"], mine["namespace"])))
        if "fleet" in mine:
            report.sections.append(("its engines and gateways", mine["fleet"].describe()))
    return report


@pytest.fixture(scope="session")
def tools():
    """Without the binaries: skipped at home, an error in CI."""
    if told := why_missing():
        assert not os.environ.get("CI"), told
        pytest.skip(told)


@pytest.fixture(scope="session", autouse=True)
def _forge():
    """Started by the first operator that is wanted."""
    yield
    FORGE.close()


@pytest.fixture(scope="session")
def plane(tools, tmp_path_factory):
    with ControlPlane(tmp_path_factory.mktemp("plane"), kwok=True) as running:
        yield running


@pytest.fixture
def bare_plane(tools, tmp_path):
    """Another one, without CRD, nodes or pods, to be treated as one likes."""
    with ControlPlane(tmp_path) as running:
        yield running


@pytest.fixture(scope="session")
def client(plane):
    return plane.client()


@pytest.fixture
def namespace(client):
    name = f"t{next(_NUMBERS)}"
    client.create("/api/v1/namespaces", {"metadata": {"name": name}})
    # Pods wait for the account that the controller manager makes.
    client.until(f"/api/v1/namespaces/{name}/serviceaccounts/default", bool)
    yield name
    client.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture
def served(client, namespace, nodes, crd):
    return Served(client, namespace)


@pytest.fixture
def fleet(client, namespace, tmp_path):
    """Fakes of engines and gateways; an operator with --dial=fleet.dial hears them."""
    with FakeFleet(client, namespace, tmp_path / "dial") as running:
        yield running


@pytest.fixture(scope="session")
def nodes(plane):
    plane.add_nodes(3)


@pytest.fixture(scope="session")
def crd(plane):
    plane.install_crd()
