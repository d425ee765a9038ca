"""Children as they are rendered."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_cluster import manifest
from tls_folder import TlsFolder, secrets

from sluice_engine.spec import load_spec
from sluice_engine.supervisor import supervise
from sluice_engine.transfer.verify import VerifyLevel
from sluice_gateway import __main__ as gateway_main
from sluice_gateway.routing.discover import parse_target
from sluice_operator import names
from sluice_operator.api.spec import ModelDeploymentSpec
from sluice_operator.api.value import from_json
from sluice_operator.decide.accept import parse
from sluice_operator.decide.diff import covers
from sluice_operator.names import ENGINE_ROLES, PodRole
from sluice_operator.render import ports
from sluice_operator.render.children import OwnerRef, controller_revision, engine_objects, gateway_deployment, standing
from sluice_operator.render.engine import pod_template, spec_file
from sluice_operator.render.merge import merge
from sluice_operator.render.model import engine_source, gateway_source
from sluice_operator.render.revision import StandardRenderer, gateway_hash, revision_hash
from sluice_protocol.engine_spec import EngineSpec
from sluice_protocol.generate import Role
from sluice_records import CachePrecision
from sluice_runtime.cluster_connection import SERVICE_ACCOUNT, ConnectionInvalid
from sluice_runtime.tls.keeper import IdentityKeeper
from sluice_runtime.tls.peers import Peer

OWNER = OwnerRef("ns", "m", "uid-1")
RENDERER = StandardRenderer("control:1")
GPU = {"type": "GPU", "gpu": {"computeMajor": [10, 12], "products": ["NVIDIA-B200"]}}


def spec(**changes):
    return from_json(ModelDeploymentSpec, manifest(**changes), "spec")


def decode(told=None, **changes):
    return pod_template("m", spec(**changes) if told is None else told, PodRole.DECODE, "r1")["spec"]


def main(pod):
    (container,) = [c for c in pod["containers"] if c["name"] == "main"]
    return container


def objects(told):
    data = RENDERER.engine("m", told, "r1")
    return (
        *standing(OWNER, told),
        controller_revision(OWNER, "r1", 1, data),
        *(item for role in ENGINE_ROLES for item in engine_objects(OWNER, role, "r1", data[role.value])),
        gateway_deployment(OWNER, 2, "g1", RENDERER.gateway("m", told, "g1")),
    )


def test_every_child_is_json_belongs_to_us_and_has_its_labels():
    for item in objects(spec(accelerator=GPU, monitoring={"podMonitor": True})):
        assert json.loads(json.dumps(item)) == item
        (reference,) = item["metadata"]["ownerReferences"]
        assert (reference["uid"], reference["kind"], reference["controller"]) == ("uid-1", "ModelDeployment", True)
        assert item["metadata"]["namespace"] == "ns"
        assert item["metadata"]["labels"]["sluice.dev/deployment"] == "m"


def test_the_longest_name_fits_everywhere():
    name = "m" * 40
    assert isinstance(parse(name, manifest()), ModelDeploymentSpec)
    owner = OwnerRef("ns", name, "u")
    told = spec(accelerator=GPU | {"gpu": {"allocation": "ResourceClaim"}}, monitoring={"podMonitor": True})
    revision = revision_hash(told)
    data = RENDERER.engine(name, told, revision)
    made = [*standing(owner, told), controller_revision(owner, revision, 1, data)]
    made += [item for role in ENGINE_ROLES for item in engine_objects(owner, role, revision, data[role.value])]
    for item in made:
        assert len(item["metadata"]["name"]) <= 63
        assert all(len(value) <= 63 for value in item["metadata"]["labels"].values())
    secrets = [names.key_secret(name), *(names.certificate_secret(name, role) for role in PodRole)]
    assert all(len(secret) <= 63 for secret in secrets)


def test_probes_have_the_designs_numbers():
    container = main(decode(probes={"startupMaxSeconds": 1805}))
    live, ready, start = (container[f"{kind}Probe"] for kind in ("liveness", "readiness", "startup"))
    assert (live["periodSeconds"], live["timeoutSeconds"], live["failureThreshold"]) == (10, 2, 3)
    assert live["terminationGracePeriodSeconds"] == 10
    assert (ready["periodSeconds"], ready["failureThreshold"]) == (2, 2)
    assert (start["periodSeconds"], start["failureThreshold"]) == (10, 181)
    assert [p["httpGet"]["path"] for p in (live, ready, start)] == ["/livez", "/readyz", "/startupz"]
    assert all(p["httpGet"]["port"] == "probe" for p in (live, ready, start))


def test_pods_meet_the_restricted_profile():
    told = spec(model={"uri": "hf://owner/name@main", "hub": {"tokenSecret": "t"}})
    pods = [decode(told), RENDERER.gateway("m", told, "g")["spec"]]
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"]["drop"] == ["ALL"]
            mounts = [mount["name"] for mount in container["volumeMounts"]]
            assert set(mounts) <= {volume["name"] for volume in pod["volumes"]}
        assert not any("hostPath" in volume for volume in pod["volumes"])


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [("", 443), ("https://mirror.example", 443), ("http://mirror.example/hf", 80), ("http://10.0.0.7:8081", 8081)],
)
def test_a_model_of_the_hub_comes_from_where_it_is_said_to_and_policies_let_it(endpoint, port):
    told = spec(model={"uri": "hf://owner/name@main"} | ({"hub": {"endpoint": endpoint}} if endpoint else {}))
    for pod in (decode(told), RENDERER.gateway("m", told, "g")["spec"]):
        (download,) = pod["initContainers"]
        environment = {env["name"]: env.get("value") for env in download["env"]}
        assert environment.get("HF_ENDPOINT", "") == endpoint
        assert environment["HF_HUB_DISABLE_TELEMETRY"] == "1"
    policies = {o["metadata"]["name"]: o["spec"] for o in standing(OWNER, told) if o["kind"] == "NetworkPolicy"}
    for name, others in (("m-prefill", set()), ("m-decode", set()), ("m-gateway", {443, 6443})):
        outside = [rule for rule in policies[name]["egress"] if "to" not in rule and rule["ports"][0]["port"] != 53]
        assert {p["port"] for rule in outside for p in rule["ports"]} == {port} | others


def test_grace_follows_from_the_drain_and_engines_get_no_token():
    pod = decode(drain={"timeoutSeconds": 100})
    assert pod["terminationGracePeriodSeconds"] == 115
    assert pod["automountServiceAccountToken"] is False
    assert pod["readinessGates"] == [{"conditionType": "sluice.dev/serving"}]


def test_the_spec_file_is_what_an_engine_reads():
    told = spec(
        precision={"kv": "FP8", "indexKeys": "FP4"},
        engine={"pageTokens": 64, "chunkTokens": 512, "maxContextTokens": 4096, "cacheMebibytes": 100},
        transport={"verify": "Sample"},
        prefill={"maxRooms": 5},
        decode={"maxRunning": 7},
    )
    for role, rows in ((PodRole.PREFILL, 5), (PodRole.DECODE, 7)):
        text = spec_file(told, role)
        read = msgspec.json.decode(text, type=EngineSpec)
        assert (read.role, read.max_running, read.page_tokens, read.memory_bytes) == (Role(role), rows, 64, 100 << 20)
        assert str(CachePrecision.parse(read.precision)) == "fp8/fp4"
        assert VerifyLevel(read.verify) is VerifyLevel.SAMPLE
        assert (read.ports.engine, read.ports.source, read.ports.probe) == (7000, 7001, 7002)
        assert read.ports.transfer == "23000-23020"
        assert "key" not in json.loads(text)


def test_an_engine_accepts_its_command_line(tmp_path):
    told = spec()
    argv = main(decode(told))["command"]
    assert argv[:3] == ["python", "-m", "sluice_decode"]
    asked = supervise.parse_arguments(as_kubelet(argv)[3:])
    assert (asked.name, asked.host, str(asked.key_file)) == ("m-decode-1", "10.0.0.7", "/etc/sluice/key/key")
    assert str(asked.tls_dir) == "/etc/sluice/tls"
    assert (str(asked.spec), asked.parent) == ("/etc/sluice/spec/engine.json", 0)
    (tmp_path / "engine.json").write_text(spec_file(told, PodRole.DECODE).replace("/run/sluice", str(tmp_path)))
    (tmp_path / "key").write_text("secret\n")
    tls = asked.tls_dir
    read, path = supervise.own_spec(tmp_path / "engine.json", "m-decode-1", "10.0.0.7", tmp_path / "key", tls)
    assert (read.name, read.host, read.key, read.tls) == ("m-decode-1", "10.0.0.7", "secret", str(tls))
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_spec(path) == read
    # Its drain is as long as the operator waits for it, and its end fits into the pod's grace.
    assert read.drain_s == told.drain.timeout_seconds
    assert read.drain_s + supervise.STOP_SLACK_S < decode(told)["terminationGracePeriodSeconds"]


ENV = {"POD_NAME": "m-decode-1", "POD_NAMESPACE": "ns", "POD_IP": "10.0.0.7"}


def as_kubelet(argv):
    """With $(VARIABLES) in their places; what is not set stays as it is."""
    return [re.sub(r"\$\((\w+)\)", lambda found: ENV.get(found[1], found[0]), text) for text in argv]


@pytest.mark.parametrize("role", list(PodRole))
def test_each_role_finds_its_own_certificate_where_its_process_looks(role, tmp_path):
    """The whole way: a Secret as the operator writes it, the volume of the pod, the flag, the keeper."""
    told = spec()
    template = RENDERER.gateway("m", told, "g") if role is PodRole.GATEWAY else pod_template("m", told, role, "r1")
    container = main(template["spec"])
    folder = container["command"][container["command"].index("--tls-dir") + 1]
    (mount,) = [mount for mount in container["volumeMounts"] if mount["mountPath"] == folder]
    # A subPath would never see a change.
    assert mount == {"name": "tls", "mountPath": folder, "readOnly": True}
    (volume,) = [volume for volume in template["spec"]["volumes"] if volume["name"] == "tls"]
    assert volume["secret"]["secretName"] == names.certificate_secret("m", role)
    written = TlsFolder(tmp_path / "tls", secrets().leaves[role].data())
    assert str(IdentityKeeper(written.path, Peer(role.value)).current.name) == f"{role}.m.ns.sluice.dev"


def test_gpus_are_asked_for_and_nodes_selected():
    pod = decode(accelerator=GPU)
    assert main(pod)["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [
        {"key": "nvidia.com/gpu.compute.major", "operator": "In", "values": ["10", "12"]},
        {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["NVIDIA-B200"]},
    ]
    assert "affinity" not in decode()
    assert main(decode())["resources"] == {}


def test_each_alternative_of_somebodys_affinity_keeps_ours():
    theirs = {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "a", "operator": "Exists"}]},
                    {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]},
                ]
            }
        },
        "podAntiAffinity": {"kept": []},
    }
    before = copy.deepcopy(theirs)
    pod = decode(accelerator=GPU, decode={"template": {"spec": {"affinity": theirs}}})
    required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert [len(term["matchExpressions"]) for term in required["nodeSelectorTerms"]] == [3, 2]
    assert pod["affinity"]["podAntiAffinity"] == {"kept": []}
    assert theirs == before


@pytest.mark.parametrize(("policy", "kind"), [("Required", "required"), ("Preferred", "preferred"), ("None", None)])
def test_an_nvlink_domain_keeps_both_roles_together(policy, kind):
    pod = decode(accelerator={"type": "GPU", "gpu": {"domain": {"policy": policy}}})
    if kind is None:
        assert "affinity" not in pod
        return
    (rule,) = pod["affinity"]["podAffinity"][f"{kind}DuringSchedulingIgnoredDuringExecution"]
    term = rule if kind == "required" else rule["podAffinityTerm"]
    assert term["topologyKey"] == "nvidia.com/gpu.clique"
    labels = pod_template("m", spec(), PodRole.PREFILL, "r2")["metadata"]["labels"]
    (expression,) = term["labelSelector"]["matchExpressions"]
    assert term["labelSelector"]["matchLabels"].items() <= labels.items()
    assert labels[expression["key"]] in expression["values"]


def test_a_claim_replaces_the_device_plugin():
    told = spec(accelerator={"type": "GPU", "gpu": {"computeMajor": [10], "allocation": "ResourceClaim"}})
    pod = decode(told)
    assert main(pod)["resources"] == {"claims": [{"name": "gpu"}]}
    (claim,) = pod["resourceClaims"]
    made = engine_objects(OWNER, PodRole.DECODE, "r1", RENDERER.engine("m", told, "r1")["decode"])
    template = next(item for item in made if item["kind"] == "ResourceClaimTemplate")
    assert claim["resourceClaimTemplateName"] == template["metadata"]["name"]
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"]["count"] == 1
    assert "in [10]" in request["exactly"]["selectors"][0]["cel"]["expression"]
    assert "nodeAffinity" not in pod["affinity"]


def test_what_somebody_puts_into_a_template_is_kept_and_ours_wins():
    template = {
        "metadata": {"annotations": {"team": "a"}, "labels": {"queue": "q"}},
        "spec": {
            "schedulerName": "kai",
            "priorityClassName": "high",
            "securityContext": {"runAsUser": 7},
            "volumes": [{"name": "rdma", "emptyDir": {}}],
            "containers": [
                {"name": "sidecar", "image": "s"},
                {
                    "name": "main",
                    "env": [{"name": "X", "value": "1"}],
                    "resources": {"limits": {"memory": "1Gi"}},
                    "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
                    "volumeMounts": [{"name": "rdma", "mountPath": "/rdma"}],
                },
            ],
        },
    }
    told = spec(accelerator=GPU, decode={"template": template})
    whole = pod_template("m", told, PodRole.DECODE, "r1")
    pod, container = whole["spec"], main(whole["spec"])
    assert whole["metadata"]["annotations"] == {"team": "a"}
    assert whole["metadata"]["labels"]["queue"] == "q"
    assert (pod["schedulerName"], pod["priorityClassName"]) == ("kai", "high")
    assert pod["securityContext"]["runAsUser"] == 7
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert [c["name"] for c in pod["containers"]] == ["main", "sidecar"]
    assert container["resources"]["limits"] == {"memory": "1Gi", "nvidia.com/gpu": "1"}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert {"name": "X", "value": "1"} in container["env"]
    assert "/rdma" in [mount["mountPath"] for mount in container["volumeMounts"]]


def test_merging_leaves_its_arguments_alone():
    theirs, ours = {"env": [{"name": "A", "value": "1"}], "x": {"y": 1}}, {"env": [{"name": "B"}], "x": {"z": 2}}
    before = copy.deepcopy((theirs, ours))
    assert merge(theirs, ours) == {"env": [{"name": "B"}, {"name": "A", "value": "1"}], "x": {"y": 1, "z": 2}}
    assert (theirs, ours) == before


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("pvc://models/a/b", "/models/a/b"),
        ("image:///opt/model", "/opt/model"),
        ("hf://owner/name@v1", "/models/owner--name--v1"),
    ],
)
def test_a_model_is_found_where_its_uri_says(uri, path):
    told = spec(model={"uri": uri})
    source = engine_source(told.model, told.image)
    assert source.path == path
    assert json.loads(spec_file(told, PodRole.PREFILL))["model"] == path
    tokenizer = gateway_source(told.model, told.image)
    argv = main(RENDERER.gateway("m", told, "g")["spec"])["command"]
    assert argv[argv.index("--tokenizer") + 1] == tokenizer.path
    # What the gateway reads, something in its pod puts there.
    mounted = [mount["mountPath"] for mount in tokenizer.mounts]
    assert any(Path(tokenizer.path).is_relative_to(mount) for mount in mounted)


def test_a_revision_is_what_engines_depend_on_and_nothing_else():
    base = revision_hash(spec())
    same = [
        {"prefill": {"replicas": 7}},
        {"decode": {"replicas": 7, "scaling": {"mode": "External"}}},
        {"gateway": {"replicas": 5, "maxQueued": 3}},
        {"rollout": {"maxSurge": 3}},
        {"quarantine": {"maxPods": 0}},
        {"paused": True},
        {"model": {"uri": "pvc://models/tiny", "servedNames": ["x"]}},
    ]
    other = [
        {"image": {"repository": "registry.local/sluice-engine", "tag": "2"}},
        {"decode": {"maxRunning": 3}},
        {"prefill": {"template": {"spec": {"priorityClassName": "x"}}}},
        {"engine": {"pageTokens": 32}},
        {"probes": {"wedgeFloorSeconds": 60, "startupMaxSeconds": 120}},
    ]
    assert {revision_hash(spec(**changes)) for changes in same} == {base}
    assert len({base, *(revision_hash(spec(**changes)) for changes in other)}) == len(other) + 1


def test_a_gateway_is_replaced_for_its_own_sake_or_for_a_new_image_of_it():
    base = gateway_hash(spec(), RENDERER)
    assert gateway_hash(spec(gateway={"replicas": 4, "service": {"type": "NodePort"}}), RENDERER) == base
    assert gateway_hash(spec(gateway={"maxQueued": 3}), RENDERER) != base
    assert gateway_hash(spec(), StandardRenderer("control:2")) != base
    assert gateway_hash(spec(decode={"maxRunning": 3}), RENDERER) == base


def test_rights_are_exact():
    made = standing(OWNER, spec())
    (role,) = [item for item in made if item["kind"] == "Role"]
    assert role["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
    ]
    (binding,) = [item for item in made if item["kind"] == "RoleBinding"]
    (subject,) = binding["subjects"]
    gateway = RENDERER.gateway("m", spec(), "g")["spec"]
    assert subject["name"] == gateway["serviceAccountName"] != decode()["serviceAccountName"]
    accounts = {item["metadata"]["name"] for item in made if item["kind"] == "ServiceAccount"}
    assert accounts == {gateway["serviceAccountName"], decode()["serviceAccountName"]}


def test_services_and_budgets_select_the_pods_they_mean():
    told = spec()
    pods = {role: pod_template("m", told, role, "r1")["metadata"]["labels"] for role in ENGINE_ROLES}
    pods[PodRole.GATEWAY] = RENDERER.gateway("m", told, "g")["metadata"]["labels"]
    for role, labels in pods.items():
        name = names.role_name("m", role)
        made = {item["kind"]: item for item in standing(OWNER, told) if item["metadata"]["name"] == name}
        assert made["Service"]["spec"]["selector"].items() <= labels.items()
        budget = made["PodDisruptionBudget"]["spec"]
        assert budget["selector"]["matchLabels"].items() <= labels.items()
        # A pod in quarantine has the labels of its role, and no part in its budget.
        assert {"key": names.LABEL_QUARANTINED, "operator": "DoesNotExist"} in budget["selector"]["matchExpressions"]
        assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    headless = next(i for i in standing(OWNER, told) if i["metadata"]["name"] == "m-decode" and i["kind"] == "Service")
    assert headless["spec"]["clusterIP"] == "None"
    assert headless["spec"]["publishNotReadyAddresses"] is True


@pytest.mark.parametrize("wanted", [0, 1, 2, 5])
def test_a_budget_lets_one_pod_go_of_those_that_are_wanted_whatever_a_rollout_adds(wanted):
    """`maxUnavailable` would count the replicas of old and new Deployments together."""
    told = spec(prefill={"replicas": wanted}, decode={"replicas": wanted})
    budgets = {i["metadata"]["name"]: i["spec"] for i in standing(OWNER, told) if i["kind"] == "PodDisruptionBudget"}
    assert budgets.keys() == {"m-prefill", "m-decode", "m-gateway"}
    for name in ("m-prefill", "m-decode"):
        assert budgets[name]["minAvailable"] == max(0, wanted - 1)
        assert "maxUnavailable" not in budgets[name]
    # Of one Deployment, whose replicas are counted as they are wanted.
    assert budgets["m-gateway"]["maxUnavailable"] == 1


def test_a_deployment_selects_its_own_pods_only():
    data = RENDERER.engine("m", spec(), "r1")
    for role in ENGINE_ROLES:
        made = engine_objects(OWNER, role, "r1", data[role.value])
        deployment = next(item for item in made if item["kind"] == "Deployment")
        wanted = deployment["spec"]["selector"]["matchLabels"]
        assert wanted.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
        assert names.LABEL_REVISION in wanted
        config = next(item for item in made if item["kind"] == "ConfigMap")
        (volume,) = [v for v in deployment["spec"]["template"]["spec"]["volumes"] if v["name"] == "spec"]
        assert volume["configMap"]["name"] == config["metadata"]["name"]
        assert config["immutable"] is True


def test_what_the_api_server_adds_is_no_difference():
    wanted = {"spec": {"ports": [{"port": 80}], "empty": {}, "none": []}}
    live = {"metadata": {"uid": "1"}, "spec": {"ports": [{"port": 80, "nodePort": 3}], "clusterIP": "x"}}
    assert covers(live, wanted)
    assert not covers(live, {"spec": {"ports": [{"port": 81}]}})
    assert not covers(live, {"spec": {"ports": []}})
    assert not covers(live, {"spec": {"absent": 1}})
    assert not covers({"spec": 3}, wanted)


def test_a_gateway_accepts_its_command_line(tmp_path):
    from sluice_gateway.supervised import parse_arguments

    argv = main(RENDERER.gateway("m", spec(), "g")["spec"])["command"]
    assert argv[:3] == ["python", "-m", "sluice_gateway.supervised"]
    assert {"POD_NAME", "POD_NAMESPACE", "POD_IP"} <= {
        entry["name"] for entry in main(RENDERER.gateway("m", spec(), "g")["spec"])["env"]
    }
    told, _ = parse_arguments([text.replace("/run/sluice", str(tmp_path)) for text in as_kubelet(argv)[3:]])
    assert (told.probe_port, told.host, told.health.evidence_dir) == (
        ports.PROBE,
        "10.0.0.7",
        "/var/lib/sluice/evidence",
    )
    assert told.health.floor_s == 30.0
    assert told.arguments[:2] == ("--listen", "*:8000")
    assert told.arguments[told.arguments.index("--tls-dir") + 1] == "/etc/sluice/tls"
    shutdown = float(told.arguments[told.arguments.index("--shutdown-s") + 1])
    grace = RENDERER.gateway("m", spec(), "g")["spec"]["terminationGracePeriodSeconds"]
    assert shutdown < told.stop_s < grace
    asked = gateway_main.parse_arguments(told.arguments)
    assert asked.report_listen == f"10.0.0.7:{ports.CONTROL}"
    target = parse_target(asked.discover)
    services = {item["metadata"]["name"] for item in standing(OWNER, spec()) if item["kind"] == "Service"}
    assert target.namespace == "ns"
    assert set(target.services) == services - {"m-gateway"}
    # The token and the CA are where every pod finds them.
    assert asked.service_account == SERVICE_ACCOUNT
    assert RENDERER.gateway("m", spec(), "g")["spec"]["automountServiceAccountToken"] is True


def test_a_gateway_says_what_it_lacks_to_discover_outside_a_pod(tmp_path, monkeypatch):
    """Its rendered arguments are enough inside one: only the environment is missing here."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    argv = main(RENDERER.gateway("m", spec(), "g")["spec"])["command"]
    asked = gateway_main.parse_arguments(argv[argv.index("--") + 1 :])
    with pytest.raises(ConnectionInvalid, match="KUBERNETES_SERVICE_HOST"):
        gateway_main.beside_of(asked, "key", {})


_TEMPLATE = {
    "metadata": {"labels": {"team": "llm"}, "annotations": {"a": "b"}},
    "spec": {
        "securityContext": {"supplementalGroups": [7], "seccompProfile": {"type": "RuntimeDefault"}},
        "affinity": {"nodeAffinity": {}, "podAffinity": {}},
        "tolerations": [{"key": "a", "operator": "Exists"}],
        "volumes": [{"name": "mine", "emptyDir": {}}],
        "initContainers": [{"name": "first", "image": "x", "securityContext": {"capabilities": {}}}],
        "containers": [
            {
                "name": "main",
                "env": [{"name": "A", "value": "b"}],
                "volumeMounts": [{"name": "mine", "mountPath": "/mine"}],
                "resources": {"limits": {"cpu": "1"}, "requests": {"cpu": "1"}},
                "securityContext": {"capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True},
            },
        ],
    },
}


def _places(value, path=()):
    """Of every member of every object."""
    for key, member in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(value, dict):
            yield (*path, key)
        if isinstance(member, dict | list):
            yield from _places(member, (*path, key))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(list(_places(_TEMPLATE))), max_size=6), st.sampled_from(["engine", "gateway"]))
def test_a_null_anywhere_in_a_template_drops_no_default(places, which):
    template = copy.deepcopy(_TEMPLATE)
    for *parents, last in places:
        there = template
        for key in parents:
            there = there[key] if there is not None else None
        if there is not None:
            there[last] = None
    told = parse("m", manifest(decode={"replicas": 1, "template": template}, gateway={"template": template}))
    if isinstance(told, tuple):
        return
    rendered = (
        RENDERER.gateway("m", told, "g1") if which == "gateway" else pod_template("m", told, PodRole.DECODE, "r1")
    )
    pod, container = rendered["spec"], main(rendered["spec"])
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert {"spec", "key"} & {mount.get("name") for mount in container["volumeMounts"]}


@pytest.mark.parametrize("template", [{"spec": None}, {"spec": {"containers": None}}, {"metadata": None}])
def test_a_template_that_is_null_is_one_that_says_nothing(template):
    said, unsaid = decode(decode={"template": template}), decode()
    assert (said["securityContext"], main(said)) == (unsaid["securityContext"], main(unsaid))


@pytest.mark.parametrize("uri", ["hf://o/n@v", "image:///models/tiny"])
def test_init_containers_of_ours_ask_for_what_the_main_one_does_without_its_devices(uri):
    """With a quota on limits no gateway ever came up: its init container had none, and nobody could give it any."""
    asked = {"requests": {"cpu": "2", "memory": "1Gi"}, "limits": {"memory": "2Gi", "vendor.example/nic": "1"}}
    template = {"spec": {"containers": [{"name": "main", "resources": asked}], "initContainers": [{"name": "mine"}]}}
    told = spec(model={"uri": uri}, gateway={"template": template})
    by_name = {c["name"]: c for c in RENDERER.gateway("m", told, "g1")["spec"]["initContainers"]}
    (ours,) = by_name.keys() & {"download", "tokenizer"}
    assert by_name[ours]["resources"] == {"requests": {"cpu": "2", "memory": "1Gi"}, "limits": {"memory": "2Gi"}}
    assert "resources" not in by_name["mine"]
    engine = decode(model={"uri": "hf://o/n@v"}, accelerator=GPU, decode={"template": template})
    download = next(c for c in engine["initContainers"] if c["name"] == "download")
    assert download["resources"] == by_name[ours]["resources"]
    bare = decode(model={"uri": "hf://o/n@v"}, accelerator=GPU)
    assert all("resources" not in c for c in bare["initContainers"])


def test_traces_go_where_the_spec_says_from_engines_and_gateways_and_a_change_is_a_revision():
    url = "http://collector.observability:4318/v1/traces"
    plain, traced = spec(monitoring={"podMonitor": True}), spec(monitoring={"otlpEndpoint": url})
    for role in ENGINE_ROLES:
        assert msgspec.json.decode(spec_file(traced, role), type=EngineSpec).otlp == url
        assert msgspec.json.decode(spec_file(plain, role), type=EngineSpec).otlp == ""
    command = main(RENDERER.gateway("m", traced, "g1")["spec"])["command"]
    told = gateway_main.parse_arguments(command[command.index("--") + 1 :])
    assert told.otlp == url
    assert "--otlp" not in main(RENDERER.gateway("m", plain, "g1")["spec"])["command"]
    assert revision_hash(traced) != revision_hash(plain) == revision_hash(spec())
    assert gateway_hash(traced, RENDERER) != gateway_hash(plain, RENDERER) == gateway_hash(spec(), RENDERER)
