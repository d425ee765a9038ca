"""The images as they run: the operator's own pods, in docker, allowed what a restricted pod is allowed and no more."""

from __future__ import annotations

import json
import os
import urllib.request

import pytest
from pod_in_docker import docker

from sluice_operator.names import PodRole
from sluice_operator.render import ports
from sluice_operator.render.engine import USER

pytestmark = [pytest.mark.images, pytest.mark.timeout(280), pytest.mark.usefixtures("built")]

TAG = os.environ.get("SLUICE_IMAGES_TAG", "dev")
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
    """Its init container has copied the tokenizer out of the engine image."""
    with pods.gateway() as pod:
        pod.until("startupProbe")
        pod.until("livenessProbe")
        pod.until("readinessProbe")
        assert pod.stop() == 0, pod.log()[-2000:]


def test_three_pods_answer_a_question(pods):
    """Over the pods' addresses: prefill's cache is pulled by decode with NIXL over TCP, from container to container."""
    with pods.engine(PodRole.PREFILL) as prefill, pods.engine(PodRole.DECODE) as decode:
        for engine in (prefill, decode):
            engine.until("readinessProbe")
        members = ("--prefill", f"{prefill.address}:{ports.ENGINE}", "--decode", f"{decode.address}:{ports.ENGINE}")
        with pods.gateway(*members) as gateway:
            gateway.until("readinessProbe")
            messages = json.loads(prefill.run_in("cat", "/opt/sluice/models/recall-1m/sample.json"))["messages"]
            body = {"model": "recall-1m", "messages": messages, "temperature": 0}
            request = urllib.request.Request(
                f"http://{gateway.address}:{ports.HTTP}/v1/chat/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                told = json.load(answer)
            assert told["choices"][0]["message"]["content"] == "The code of amber falcon is 4719."
            status = json.loads(decode.get("/status", ports.PROBE)[1])
            assert status["transfers"]["counters"]["bytes"] > 0


def test_an_operator_lives_while_the_api_server_is_away_and_helms_test_finds_it(pods):
    away = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"}
    with pods.chart("Deployment", environment=away) as operator:
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
