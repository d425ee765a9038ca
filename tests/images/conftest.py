"""Images that `make images` built, and the pods that the operator makes of them."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from fake_api import FakeApi, endpoint_slice
from fake_hub import FakeHub
from pod_in_docker import Network, Pod, docker, why_no_docker

from sluice_operator import names
from sluice_operator.api.spec import ModelDeploymentSpec
from sluice_operator.api.value import from_json
from sluice_operator.keys import certificates
from sluice_operator.names import PodRole
from sluice_operator.render import ports
from sluice_operator.render.engine import SPEC_FILE
from sluice_operator.render.revision import StandardRenderer

ROOT = Path(__file__).resolve().parents[2]
TAG = os.environ.get("SLUICE_IMAGES_TAG", "dev")
CONTROL, ENGINE = f"sluice-control:{TAG}", f"sluice-engine:{TAG}"
CHART_IMAGE = "registry.local/sluice-control:1"
IMAGES = {"control:1": CONTROL, CHART_IMAGE: CONTROL, "sluice-engine:1": ENGINE}
MODEL = "/opt/sluice/models/recall-1m"
NAME, NAMESPACE, REVISION = "m", "ns", "r1"
LIFE_S = 3600.0
HUB_TOKEN, SERVICE_TOKEN = "hf_of_the_test", "of the gateway's account"
SPEC: ModelDeploymentSpec = from_json(
    ModelDeploymentSpec,
    {
        "model": {"uri": f"image://{MODEL}", "servedNames": ["recall-1m"]},
        "image": {"repository": "sluice-engine", "tag": "1"},
        "accelerator": {"type": "CPU"},
        "prefill": {"replicas": 1},
        "decode": {"replicas": 1},
    },
    "spec",
)


@pytest.fixture(scope="session")
def built() -> None:
    """Whoever asks for these tests has docker and the images: that they are away is no reason to be silent."""
    if problem := why_no_docker():
        pytest.fail(f"{problem}; start one and set DOCKER_HOST")
    missing = [image for image in (CONTROL, ENGINE) if not docker("images", "--quiet", image).strip()]
    if missing:
        pytest.fail(f"no image {', '.join(missing)}: `make images` builds them")


@pytest.fixture
def network() -> Iterator[Network]:
    with Network() as made:
        yield made


@pytest.fixture(scope="session")
def authority() -> certificates.Authority:
    """The deployment's own; the cluster's too, here."""
    return certificates.new_authority(NAME, NAMESPACE, time.time() + LIFE_S)


@pytest.fixture(scope="session")
def files(authority: certificates.Authority) -> dict[str, dict[str, bytes]]:
    """What the operator would have put into Secrets and ConfigMaps, and the kubelet into a pod."""
    told = {names.certificate_secret(NAME, role): issued(authority, role).data() for role in PodRole}
    told[names.key_secret(NAME)] = {"key": secrets.token_hex(16).encode()}
    told["hub-token"] = {"token": HUB_TOKEN.encode()}
    told["serviceaccount"] = {
        "token": SERVICE_TOKEN.encode(),
        "ca.crt": authority.certificate,
        "namespace": NAMESPACE.encode(),
    }
    return told


def issued(authority: certificates.Authority, role: PodRole) -> certificates.Issued:
    """What the pods of that role find in their Secret."""
    until = time.time() + LIFE_S
    return certificates.issue(authority, [authority.certificate], role.value, NAME, NAMESPACE, until)


class Pods:
    """Makes pods of one test, in one network. `of`: what the operator renders for a role."""

    def __init__(
        self, network: Network, folder: Path, files: dict[str, dict[str, bytes]], authority: certificates.Authority
    ) -> None:
        self.network, self.folder, self.files, self.authority = network, folder, files, authority

    def engine(self, role: PodRole, spec: ModelDeploymentSpec = SPEC, **changes: object) -> Pod:
        data = StandardRenderer("control:1").engine(NAME, spec, REVISION)
        config = {names.engine_name(NAME, role, REVISION): {SPEC_FILE: data[role.value]["file"].encode()}}
        return self.make(data[role.value]["template"], f"{NAME}-{role}", files=self.files | config, **changes)

    def gateway(self, spec: ModelDeploymentSpec = SPEC, **changes: object) -> Pod:
        return self.make(StandardRenderer("control:1").gateway(NAME, spec, REVISION), f"{NAME}-gateway", **changes)

    def api(self, **engines: str) -> FakeApi:
        """An API server that knows these engines: role -> address."""
        slices = [
            endpoint_slice(names.role_name(NAME, PodRole(role)), [address], ports.ENGINE)
            for role, address in engines.items()
        ]
        return FakeApi(self.network.gateway, self.authority, SERVICE_TOKEN, slices, self.folder)

    def chart(self, kind: str, **changes: object) -> Pod:
        """Of that kind in the chart: the operator's Deployment, or helm's test."""
        rendered = yaml.safe_load_all((ROOT / "tests/cluster/golden/default.yaml").read_text())
        item = next(item for item in rendered if item and item["kind"] == kind)
        return self.make(item if kind == "Pod" else item["spec"]["template"], item["metadata"]["name"], **changes)

    def make(self, template: object, name: str, **changes: object) -> Pod:
        told = {"files": self.files, "images": IMAGES, "name": name, "namespace": NAMESPACE} | changes
        return Pod(template, self.network, self.folder / name, **told)  # type: ignore[arg-type]


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub(ROOT / "models" / "recall-1m", HUB_TOKEN) as made:
        yield made


@pytest.fixture
def pods(
    network: Network, tmp_path: Path, files: dict[str, dict[str, bytes]], authority: certificates.Authority
) -> Pods:
    tmp_path.chmod(0o755)
    return Pods(network, tmp_path, files, authority)
