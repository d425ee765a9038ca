"""The examples of docs/kubernetes: accepted, placed where they say, and in tune with what they refer to."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import pytest
import yaml
from flash_config import FLASH

from sluice_cli.__main__ import main
from sluice_operator import names
from sluice_operator.api.spec import ModelDeploymentSpec
from sluice_operator.api.value import from_json
from sluice_operator.names import PodRole, role_name
from sluice_operator.render import ports
from sluice_operator.render.children import OwnerRef, standing

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "kubernetes"
EXAMPLES = DOCS / "examples"
PLACES = {
    "quickstart": {"cpu-0"},
    "b200": {"b200-0"},
    "gb200": {"gb200-0", "gb200-1", "gb200-2"},
    "rtx-pro-6000": {"rtx-0"},
}


def documents(name: str) -> list[dict[str, object]]:
    return list(yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text()))


def sluice(*argv: str) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main(list(argv))
    return status, out.getvalue()


def deployments() -> dict[str, dict[str, object]]:
    found = {path.stem: yaml.safe_load_all(path.read_text()) for path in sorted(EXAMPLES.glob("*.yaml"))}
    return {name: item for name, items in found.items() for item in items if item and item["kind"] == "ModelDeployment"}


def test_all_of_them_are_tried():
    assert set(deployments()) == set(PLACES)


@pytest.mark.parametrize("name", PLACES)
def test_it_is_accepted_and_has_its_place_and_no_other(name):
    nodes = str(EXAMPLES / "nodes.yaml")
    status, told = sluice("plan", "-f", str(EXAMPLES / f"{name}.yaml"), "--nodes", nodes)
    assert status == 0, told
    assert "Accepted: True" in told
    assert "Placed: True" in told
    for role in ("prefill", "decode"):
        assert set(re.findall(rf"^  (\S+) +{role} +matches$", told, re.MULTILINE)) == PLACES[name]


@pytest.mark.parametrize("name", sorted(set(PLACES) - {"quickstart"}))
def test_production_values_pin_an_image_ask_for_keys_and_bound_what_a_pod_takes(name):
    spec = from_json(ModelDeploymentSpec, deployments()[name]["spec"], "spec")
    assert spec.image.digest
    assert spec.gateway.api_keys_secret
    assert spec.gateway.replicas >= 2
    assert spec.engine.cache_mebibytes
    for role in (spec.prefill, spec.decode):
        (container,) = role.template["spec"]["containers"]
        assert {"requests", "limits"} <= container["resources"].keys()


def test_ways_in_lead_to_a_service_that_there_will_be():
    (route,), (ingress,) = documents("httproute"), documents("ingress")
    manifest = deployments()["b200"]
    name, spec = manifest["metadata"]["name"], from_json(ModelDeploymentSpec, manifest["spec"], "spec")
    services = [o for o in standing(OwnerRef("llm", name, "u"), spec) if o["kind"] == "Service"]
    (service,) = [s for s in services if s["metadata"]["name"] == role_name(name, PodRole.GATEWAY)]
    (port,) = service["spec"]["ports"]
    (rule,) = route["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": service["metadata"]["name"], "port": port["port"]}]
    assert port["port"] == ports.SERVICE
    assert rule["timeouts"] == {"request": "0s", "backendRequest": "0s"}
    (path,) = ingress["spec"]["rules"][0]["http"]["paths"]
    assert path["backend"] == {"service": {"name": service["metadata"]["name"], "port": {"name": port["name"]}}}
    for item in (route, ingress):
        assert item["metadata"]["namespace"] == manifest["metadata"]["namespace"]


def test_a_proxys_patience_is_above_the_gateways_own():
    from sluice_gateway.settings import Settings

    (ingress,) = documents("ingress")
    told = {key.rpartition("/")[2]: value for key, value in ingress["metadata"]["annotations"].items()}
    defaults = {name: field.default for name, field in Settings.__dataclass_fields__.items()}
    assert int(told["proxy-read-timeout"]) > defaults["deadline_s"]
    assert told["proxy-body-size"] == f"{defaults['max_body_bytes'] >> 20}m"
    assert told["proxy-buffering"] == "off"


def test_what_the_hub_needs_is_what_the_example_that_downloads_names():
    secret, claim = documents("hub")
    hub = deployments()["rtx-pro-6000"]["spec"]["model"]["hub"]
    assert secret["metadata"]["name"] == hub["tokenSecret"]
    assert "token" in secret["stringData"]
    assert claim["metadata"]["name"] == hub["cacheClaim"]
    namespaces = {secret["metadata"]["namespace"], claim["metadata"]["namespace"]}
    assert namespaces == {deployments()["rtx-pro-6000"]["metadata"]["namespace"]}


def test_figures_of_sizing_are_those_of_sluice_size(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(FLASH))
    argv = ("--precision", "fp8", "--context", "131072", "--memory", "24GiB")
    status, told = sluice("size", "--config", str(config), *argv)
    assert status == 0
    text = (DOCS / "production.md").read_text()
    assert " ".join(argv).replace("--memory 24GiB", "").strip() in text
    for figure, row in (
        (r"bytes in the files .*  ([\d.]+ GiB)", r"weights as published \| {}"),
        (r"bytes per token +([\d,.]+)", r"cache, fp8 \| {} bytes per token"),
        (r"a sequence of 131,072 tokens: .*  ([\d.]+ MiB)", r"a sequence of 131,072 tokens \| {}"),
        (r"sequences of 131,072 tokens: (\d+)", r"24 GiB of cache hold \| {} such"),
    ):
        found = re.search(figure, told)
        assert found is not None, figure
        assert re.search(row.format(re.escape(found[1])), text), found[1]
    spec = from_json(ModelDeploymentSpec, deployments()["b200"]["spec"], "spec")
    assert spec.engine.cache_mebibytes == 24 * 1024
    assert spec.engine.max_context_tokens == 131072


def test_the_inference_pool_has_the_gateways_and_their_port():
    pool, route = documents("inferencepool")
    name = pool["metadata"]["name"]
    assert pool["spec"]["selector"]["matchLabels"] == names.selector(name, PodRole.GATEWAY)
    assert pool["spec"]["targetPorts"] == [{"number": ports.HTTP}]
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", name)
