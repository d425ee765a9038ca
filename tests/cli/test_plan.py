"""`sluice plan`: files in, steps and the why-not table out."""

from __future__ import annotations

import copy
import io

import pytest
import yaml

from sluice_cli.__main__ import main

MDEP = """
apiVersion: sluice.dev/v1alpha1
kind: ModelDeployment
metadata: {name: v4-flash, namespace: llm}
spec:
  model: {uri: "pvc://models/deepseek-v4-flash"}
  image: {repository: registry.local/sluice-engine, tag: "1"}
  accelerator: {type: GPU, gpu: {computeMajor: [10]}}
  prefill: {replicas: 2}
  decode: {replicas: 3}
"""
NODES = """
apiVersion: v1
kind: List
items:
- kind: Node
  metadata: {name: h100, labels: {nvidia.com/gpu.compute.major: "9", nvidia.com/gpu.product: NVIDIA-H100}}
  status: {allocatable: {nvidia.com/gpu: "8"}}
- kind: Node
  metadata: {name: b200, labels: {nvidia.com/gpu.compute.major: "10", nvidia.com/gpu.product: NVIDIA-B200}}
  status: {allocatable: {nvidia.com/gpu: "8"}}
---
kind: Node
metadata: {name: cpu}
"""


@pytest.fixture
def files(tmp_path):
    def write(**texts):
        for name, text in texts.items():
            (tmp_path / f"{name}.yaml").write_text(text)
        return [str(tmp_path / f"{name}.yaml") for name in texts]

    return write


def test_a_field_that_no_pod_has_is_refused_with_its_path(files, capsys):
    (mdep,) = files(mdep=MDEP.replace("prefill: {replicas: 2}", "prefill: {template: {spec: {priorityClass: x}}}"))
    assert main(["plan", "-f", mdep]) == 1
    told = capsys.readouterr().out
    assert "Accepted: False" in told
    assert "spec.prefill.template.spec.priorityClass: is no field that Kubernetes" in told
    assert "did you mean priorityClassName?" in told
    assert main(["plan", "-f", mdep, "-o", "yaml"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "spec.prefill.template.spec.priorityClass" in told.err


def test_the_objects_as_yaml(files, capsys):
    (mdep,) = files(mdep=MDEP)
    assert main(["plan", "-f", mdep, "-o", "yaml"]) == 0
    text = capsys.readouterr().out
    found = list(yaml.safe_load_all(text))
    kinds = {item["kind"] for item in found}
    assert kinds >= {"Deployment", "Service", "ConfigMap", "NetworkPolicy", "PodDisruptionBudget", "ControllerRevision"}
    deployments = {i["metadata"]["labels"]["sluice.dev/role"]: i for i in found if i["kind"] == "Deployment"}
    assert {role: item["spec"]["replicas"] for role, item in deployments.items()} == {
        "prefill": 2,
        "decode": 3,
        "gateway": 2,
    }
    assert {item["metadata"]["namespace"] for item in found} == {"llm"}
    assert all(item["apiVersion"] and "ownerReferences" not in item["metadata"] for item in found)
    assert "&id" not in text  # no parts that other YAML refers to


def test_objects_come_alone(files, capsys):
    mdep, nodes = files(mdep=MDEP, nodes=NODES)
    assert main(["plan", "-f", mdep, "-o", "yaml", "--nodes", nodes]) == 2
    assert "leave --nodes and --from out" in capsys.readouterr().err


def test_steps_and_the_table_of_nodes(files, capsys):
    mdep, nodes = files(mdep=MDEP, nodes=NODES)
    assert main(["plan", "-f", mdep, "--nodes", nodes]) == 0
    told = capsys.readouterr().out
    assert "Accepted: True" in told
    assert "apply Deployment v4-flash-gateway" in told
    assert "scale decode from 0 to 3" in told
    assert "Placed: True (Placed): 1 of 3 nodes can be used." in told
    assert "h100  prefill  no: compute major is not 10: 9 (NVIDIA-H100)" in told
    assert "cpu   decode   no: no nvidia.com/gpu: it offers none" in told


def test_with_the_pods_too_it_knows_which_gpus_are_free(files, capsys):
    """As `kubectl get nodes,pods -A -o yaml` prints them."""
    pods = """
---
kind: Pod
spec: {nodeName: b200, containers: [{resources: {limits: {nvidia.com/gpu: "8"}}}]}
"""
    mdep, nodes = files(mdep=MDEP, nodes=NODES + pods)
    assert main(["plan", "-f", mdep, "--nodes", nodes]) == 0
    told = capsys.readouterr().out
    assert "b200  prefill  no: no free GPU: 0 of 8 are free" in told
    assert "(all of them are full now)" in told


def test_a_rollout_step_by_step(files, capsys):
    new, old = files(new=MDEP.replace('tag: "1"', 'tag: "2"'), old=MDEP)
    assert main(["plan", "-f", new, "--from", old]) == 0
    told = capsys.readouterr().out.splitlines()
    assert sum(line.strip().startswith("drain one") for line in told) == 5
    capacities = [int(line.split("capacity ")[1].split("%")[0]) for line in told if "capacity" in line]
    assert min(capacities) >= 100
    assert main(["plan", "-f", new, "--from", new]) == 0
    assert "no engine restarts" in capsys.readouterr().out


def test_what_the_autoscaler_has_set_stays_where_the_new_file_says_nothing(files, capsys):
    """It printed a way down to one engine that `kubectl apply` would not have gone."""
    new = yaml.safe_load(MDEP)
    new["spec"]["decode"] = {"scaling": {"mode": "Auto", "auto": {"minReplicas": 1, "maxReplicas": 9}}}
    old = copy.deepcopy(new)
    old["spec"]["decode"]["replicas"] = 8
    told_new, told_old = files(new=yaml.safe_dump(new), old=yaml.safe_dump(old))
    assert main(["plan", "-f", told_new, "--from", told_old]) == 0
    assert "shrink" not in capsys.readouterr().out
    new["spec"]["decode"]["replicas"] = 7
    (told_new,) = files(new=yaml.safe_dump(new))
    assert main(["plan", "-f", told_new, "--from", told_old]) == 0
    assert "drain one decode" in capsys.readouterr().out


def test_what_is_wrong_is_named_and_the_status_is_1(files, capsys):
    (mdep,) = files(mdep=MDEP.replace("computeMajor: [10]", "computeMajor: [x]"))
    assert main(["plan", "-f", mdep]) == 1
    told = capsys.readouterr().out
    assert "Accepted: False" in told
    assert "spec.accelerator.gpu.computeMajor[0]" in told


def test_several_ranks_are_not_accepted_and_placed_all_the_same(files, capsys):
    mdep, nodes = files(mdep=MDEP.replace("{replicas: 3}", "{parallelism: {tensor: 16}}"), nodes=NODES)
    assert main(["plan", "-f", mdep, "--nodes", nodes]) == 1
    told = capsys.readouterr().out
    assert "TensorUnsupported: spec.decode.parallelism.tensor" in told
    assert "TensorExceedsNode" in told


def test_no_place_is_status_1(files, capsys):
    mdep, nodes = files(mdep=MDEP.replace("[10]", "[12]"), nodes=NODES)
    assert main(["plan", "-f", mdep, "--nodes", nodes]) == 1
    assert "NoNodeMatches" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: [", "is no YAML"),
        ("- 1", "no Kubernetes object"),
        ("kind: Pod", "holds 0 ModelDeployments"),
        (MDEP + "---" + MDEP, "holds 2 ModelDeployments"),
        ("kind: ModelDeployment", "metadata.name is missing"),
    ],
)
def test_another_file_is_refused_by_name(files, capsys, text, why):
    (mdep,) = files(mdep=text)
    assert main(["plan", "-f", mdep]) == 2
    assert why in capsys.readouterr().err


def test_it_reads_what_is_piped_to_it(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(MDEP))
    assert main(["plan", "-f", "-"]) == 0
    assert "Accepted: True" in capsys.readouterr().out


def test_a_file_that_is_not_there(capsys):
    assert main(["plan", "-f", "/nowhere.yaml"]) == 2
    assert "/nowhere.yaml" in capsys.readouterr().err
