"""The images as they run: the operator's own pods, in docker, allowed what a restricted pod is allowed and no more."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pod_in_docker import Pod, docker

from sluice_operator.api.spec import ModelDeploymentSpec
from sluice_operator.api.value import from_json
from sluice_operator.names import PodRole
from sluice_operator.render import ports
from sluice_operator.render.engine import USER

pytestmark = [pytest.mark.images, pytest.mark.timeout(280), pytest.mark.usefixtures("built")]

ROOT = Path(__file__).resolve().parents[2]
TAG = os.environ.get("SLUICE_IMAGES_TAG", "dev")
# Where an API server would be, and nobody is.
AWAY = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"}
COMPILERS = ("cc", "gcc", "g++", "clang", "ld", "as", "make", "rustc", "go", "nvcc")
SAID = """
import importlib.metadata as metadata, importlib.util as util, json, os, shutil, sys
print(json.dumps({
    "uid": os.getuid(),
    "faults": [str(point) for point in metadata.entry_points(group="sluice.faults")],
    "modules": [name for name in ("sluice_faults", "torch", "nixl_cu13", "kopf", "pytest") if util.find_spec(name)],
    "programs": [name for name in sys.argv[1:] if shutil.which(name)],
    "writable": [os.path.join(at, name) for top in ("/opt", "/usr", "/etc", "/home", "/root", "/srv")
                 for at, dirs, files in os.walk(top) for name in dirs + files
                 if os.access(os.path.join(at, name), os.W_OK) and not os.path.islink(os.path.join(at, name))],
    "caches": [at for at in ("/root/.cache", "/tmp/.cache", "/var/lib/apt/lists", "/var/cache/apt/archives")
               if os.path.isdir(at) and os.listdir(at)],
}))
"""


def said(image: str) -> dict[str, list[str]]:
    words = ["run", "--rm", "--network", "none", "--read-only", image, "python", "-c", SAID, *COMPILERS]
    told: dict[str, list[str]] = json.loads(docker(*words))
    return told


@pytest.mark.parametrize(
    ("name", "modules"), [("control", ["kopf"]), ("engine", ["torch", "nixl_cu13"])], ids=["control", "engine"]
)
def test_what_is_in_it_and_what_is_not(name, modules):
    assert said(f"sluice-{name}:{TAG}") == {
        "uid": USER,
        "faults": [],
        "modules": modules,
        "programs": [],
        "writable": [],
        "caches": [],
    }


@pytest.mark.parametrize("role", [PodRole.PREFILL, PodRole.DECODE])
def test_an_engine_loads_a_model_and_answers_its_probes(pods, role):
    with pods.engine(role) as pod:
        pod.until("startupProbe")
        pod.until("livenessProbe")
        pod.until("readinessProbe")
        status, text = pod.get("/metrics", ports.PROBE)
        assert status == 200
        assert f'sluice_ready{{role="{role}",service="{NAME_OF[role]}"}} 1.0' in text
        assert pod.run_in("id", "-u").strip() == str(USER)
        assert pod.stop() == 0, pod.log()[-2000:]


NAME_OF = {PodRole.PREFILL: "m-prefill", PodRole.DECODE: "m-decode"}


def test_a_gateway_lives_and_is_ready_before_there_are_engines(pods):
    """Its init container has copied the tokenizer out of the engine image; the API server is away."""
    with pods.gateway(environment=AWAY) as pod:
        pod.until("startupProbe")
        pod.until("livenessProbe")
        pod.until("readinessProbe")
        assert pod.stop() == 0, pod.log()[-2000:]


def test_three_pods_answer_a_question(pods):
    """The gateway finds its engines by EndpointSlices; prefill's cache goes to decode by NIXL over TCP, from address to
    address."""
    with pods.engine(PodRole.PREFILL) as prefill, pods.engine(PodRole.DECODE) as decode:
        for engine in (prefill, decode):
            engine.until("readinessProbe")
        with (
            pods.api(prefill=prefill.address, decode=decode.address) as api,
            pods.gateway(environment=api.environment) as gateway,
        ):
            gateway.until("readinessProbe")
            messages = json.loads(prefill.run_in("cat", "/opt/sluice/models/recall-1m/sample.json"))["messages"]
            told = ask(gateway, {"model": "recall-1m", "messages": messages, "temperature": 0})
            assert told["choices"][0]["message"]["content"] == "The code of amber falcon is 4719."
            # The flight recorder is written now and then, not at every READ.
            until(lambda: counters(decode).get("bytes", 0) > 0)


def ask(gateway: Pod, body: object, timeout_s: float = 60.0) -> dict[str, Any]:
    """A chat completion. 503 until the gateway has reached its engines, which it is ready without. AssertionError with
    its log if that goes on."""
    url, deadline = f"http://{gateway.address}:{ports.HTTP}/v1/chat/completions", time.monotonic() + timeout_s
    while True:
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                told: dict[str, Any] = json.load(answer)
                return told
        except urllib.error.HTTPError as error:
            if error.code != 503 or time.monotonic() > deadline:
                raise AssertionError(f"{error.code}: {error.read().decode()}: {gateway.log()[-3000:]}") from error
        time.sleep(0.2)


def counters(engine: Pod) -> dict[str, int]:
    """Of its transport."""
    told: dict[str, int] = json.loads(engine.get("/status", ports.PROBE)[1])["transfers"]["counters"]
    return told


def until(holds: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_model_of_the_hub_is_downloaded_before_the_engine_starts(pods, hub):
    """With what a restricted pod may write to; the token goes along, and gateways take the small files alone."""
    spec = from_json(
        ModelDeploymentSpec,
        {
            "model": {
                "uri": f"hf://{hub.repository}@{hub.commit}",
                "hub": {"tokenSecret": "hub-token", "endpoint": f"http://{pods.network.gateway}:{hub.port}"},
            },
            "image": {"repository": "sluice-engine", "tag": "1"},
            "accelerator": {"type": "CPU"},
        },
        "spec",
    )
    with pods.engine(PodRole.PREFILL, spec) as pod:
        pod.until("readinessProbe")
    assert hub.served("config.json", "model.safetensors", "tokenizer.json")
    # The client's own, public list of what it may run under.
    assert hub.strangers <= {"/api/agent-harnesses"}
    hub.forget()
    with pods.gateway(spec, environment=AWAY) as pod:
        pod.until("readinessProbe")
    assert hub.served("config.json", "tokenizer.json")
    assert not hub.served("model.safetensors")


def test_a_change_of_code_moves_the_last_layer_alone(tmp_path):
    """Built again as it was, of a copy in which one package says one thing more."""
    told = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    context = tmp_path / "context"
    for path in filter(None, told.stdout.split("\0")):
        (context / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, context / path)
    with (context / "operator/sluice_operator/__init__.py").open("a") as file:
        file.write("CHANGED = True\n")
    # As `make images-test` has built them, or the layers below would be others.
    options = [f"--{name}={value}" for name in ("base", "ca-bundle") if (value := os.environ.get(setting(name)))]
    tag = f"changed-{tmp_path.parent.name}"
    try:
        subprocess.run(
            [sys.executable, "images/build.py", *options, "--tag", tag, "control"], cwd=context, check=True, timeout=270
        )
        before, after = layers(f"sluice-control:{TAG}"), layers(f"sluice-control:{tag}")
        assert before[:-1] == after[:-1]
        assert before[-1] != after[-1]
        code = "import sluice_operator; print(sluice_operator.CHANGED)"
        words = ["run", "--rm", "--network", "none", f"sluice-control:{tag}", "python", "-c", code]
        assert docker(*words).strip() == "True"
    finally:
        docker("rmi", "--force", f"sluice-control:{tag}")


def setting(name: str) -> str:
    return f"SLUICE_IMAGES_{name.upper().replace('-', '_')}"


def layers(image: str) -> list[str]:
    told: list[str] = json.loads(docker("inspect", "--format", "{{json .RootFS.Layers}}", image))
    return told


def test_an_operator_lives_while_the_api_server_is_away_and_helms_test_finds_it(pods):
    with pods.chart("Deployment", environment=AWAY) as operator:
        operator.until("livenessProbe")
        status, text = operator.get("/metrics", 8080)
        assert status == 200
        assert "sluice_operator_leader 0.0" in text
        hosts = {"sluice-operator.sluice.svc": operator.address}
        with pods.chart("Pod", hosts=hosts) as test:
            assert test.wait() == 0, test.log()
            assert test.log().strip() == "ok"
        assert operator.stop() == 0, operator.log()[-2000:]


def test_helms_test_fails_where_nobody_answers(pods):
    with pods.chart("Pod", hosts={"sluice-operator.sluice.svc": "127.0.0.1"}) as test:
        assert test.wait() != 0
        assert "Connection refused" in test.log()
