"""One control plane for all tests that do not break it; each of them works in a namespace of its own."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from cluster_tools import why_missing
from control_plane import ControlPlane

CRD = Path(__file__).parents[2] / "charts/sluice-crds/templates/modeldeployments.yaml"
_NUMBERS = itertools.count(1)


@pytest.fixture(scope="session")
def tools():
    """Without the binaries: skipped at home, an error in CI."""
    if told := why_missing():
        assert not os.environ.get("CI"), told
        pytest.skip(told)


@pytest.fixture(scope="session")
def plane(tools, tmp_path_factory):
    with ControlPlane(tmp_path_factory.mktemp("plane"), kwok=True) as running:
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


@pytest.fixture(scope="session")
def nodes(client):
    """Three, without GPUs."""
    for name in ("plain-0", "plain-1", "plain-2"):
        client.create("/api/v1/nodes", {"kind": "Node", "metadata": {"name": name}})
        client.until(f"/api/v1/nodes/{name}", lambda there: there["status"].get("phase") == "Running")


@pytest.fixture(scope="session")
def crd(plane, client):
    """Installed as a user would."""
    plane.kubectl("apply", "-f", str(CRD))
    client.until("/apis/sluice.dev/v1alpha1", bool)
    # What kubectl goes by is put together by controllers of its own.
    client.until("/openapi/v3", lambda told: "apis/sluice.dev/v1alpha1" in told["paths"])
    discovery = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
    client.until("/apis", lambda told: "sluice.dev" in [g["metadata"]["name"] for g in told["items"]], accept=discovery)
    # The apply has left kubectl with what there was before it.
    plane.kubectl("api-resources", "--cached=false")
