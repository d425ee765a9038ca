"""The charts: what they render, whom they let do what, and how they come and go."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import yaml
from cluster_deployment import Served
from network_policy import Address, Pod, allows
from operator_cluster import manifest
from operator_process import OperatorProcess

from charts import CHARTS, GOLDEN, IMAGE, VARIANTS, helm, objects, render
from sluice_operator.__main__ import parser
from sluice_operator.api.spec import ModelDeploymentSpec
from sluice_operator.api.value import from_json
from sluice_operator.keys.certificates import NotOurs, read_leaf
from sluice_operator.keys.keyring import decode
from sluice_operator.live.cluster import KINDS
from sluice_operator.names import OPERATOR_LABELS, PodRole, certificate_secret, role_labels
from sluice_operator.render import ports
from sluice_operator.render.children import OwnerRef, standing

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def _tools(tools):
    """helm is one of them."""


def rules(items):
    return [rule for item in items if item["kind"] in ("Role", "ClusterRole") for rule in item["rules"]]


def test_helm_has_nothing_against_them():
    told = helm("lint", str(CHARTS / "sluice"), str(CHARTS / "sluice-crds"), "--strict", *IMAGE)
    assert "2 chart(s) linted, 0 chart(s) failed" in told


@pytest.mark.parametrize("variant", VARIANTS)
def test_they_render_as_was_agreed(variant):
    """`python tests/support/charts.py` writes these files; look at the difference before you commit it."""
    assert render(*VARIANTS[variant]) == (GOLDEN / f"{variant}.yaml").read_text()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (("--set-string", "image.repository="), "image"),
        (("--set-string", "image.digest=sha256:" + "a" * 64), "image"),
        (("--set-string", "image.digest=abc,image.tag="), "digest"),
        (("--set", "replicas=0"), "replicas"),
        (("--set", "replicas=two"), "replicas"),
        (("--set", "watch.namespaces={Not_A_Name}"), "namespaces"),
        (("--set", "nodes.reed=true"), "reed"),
        (("--set", "watch.namespaces={a},watch.allNamespaces=true"), "namespaces"),
        (("--set", "resyncSeconds=1"), "resyncSeconds"),
        (("--set", "resyncSeconds=3600"), "resyncSeconds"),
        (("--set", "image.pullPolicy=Sometimes"), "pullPolicy"),
        (("--set", "webhook.enabled=true"), "webhook"),
        (("--set", "networkPolicy.apiServerPorts={0}"), "apiServerPorts"),
        (("--set", "monitoring.dashboards=yes"), "dashboards"),
        (("--set-string", "labels.app\\.kubernetes\\.io/name=x"), "app.kubernetes.io/name"),
        (("--set", "logLevel=loud"), "logLevel"),
        (("--set", "pods.runAsUser=0"), "runAsUser"),
        (("--set", "networkPolicy.dnsPorts={}"), "dnsPorts"),
        (("--set", "fullnameOverride=Not_A_Name"), "fullnameOverride"),
        (("--set-json", 'extraEnv=[{"value":"x"}]'), "extraEnv"),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(values, words):
    told = helm("template", "sluice", str(CHARTS / "sluice"), *IMAGE, *values, fails=True)
    assert words in told


def test_every_value_has_a_description_and_a_default():
    schema = json.loads((CHARTS / "sluice/values.schema.json").read_text())
    values = yaml.safe_load((CHARTS / "sluice/values.yaml").read_text())

    def walk(node, value, path):
        for name, member in node["properties"].items():
            if name == "global":
                continue
            assert name in value, f"{path}{name}"
            if "properties" in member:
                walk(member, value[name], f"{path}{name}.")
            else:
                assert member["description"].endswith("."), f"{path}{name}"

    walk(schema, values, "")


@pytest.mark.parametrize("variant", VARIANTS)
def test_nobody_is_given_more_than_is_used(variant):
    for rule in rules(objects(*VARIANTS[variant])):
        words = [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
        assert "*" not in words
        assert not {"escalate", "bind", "impersonate"} & set(words)
        assert not {"pods/exec", "pods/attach", "pods/portforward", "nodes/proxy"} & set(words)
        if "secrets" in rule["resources"]:
            assert set(rule["verbs"]) == {"get", "create", "update"}
        if "nodes" in rule["resources"]:
            assert rule["verbs"] == ["list"]


def test_without_asking_for_more_there_are_rights_in_one_namespace_only():
    made = objects()
    assert not [item for item in made if item["kind"].startswith("Cluster")]
    assert {item["metadata"]["namespace"] for item in made} == {"sluice"}


def test_the_operator_takes_the_arguments_that_it_is_given_and_policies_let_it_through():
    for variant in VARIANTS.values():
        deployment = next(item for item in objects(*variant) if item["kind"] == "Deployment")
        pod = deployment["spec"]["template"]
        args = parser().parse_args(pod["spec"]["containers"][0]["args"])
        assert args.control_image == pod["spec"]["containers"][0]["image"]
        assert OPERATOR_LABELS.items() <= pod["metadata"]["labels"].items()


def by_kind(*values):
    return {(item["kind"], item["metadata"]["name"]): item for item in objects(*values)}


def test_what_platform_engineers_set_is_where_it_belongs():
    made = by_kind(*VARIANTS["platform"])
    whole = made["Deployment", "serving"]["spec"]["template"]
    pod, container = whole["spec"], whole["spec"]["containers"][0]
    assert pod["serviceAccountName"] == "sluice-sa"
    assert made["ServiceAccount", "sluice-sa"]["metadata"]["annotations"] == {"a": "b", "cost": "42"}
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert container["securityContext"]["privileged"] is False
    assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in container["env"]
    assert pod["terminationGracePeriodSeconds"] == 60
    assert [constraint["topologyKey"] for constraint in pod["topologySpreadConstraints"]] == ["zone"]
    assert whole["metadata"]["labels"].items() >= {"team": "search", "tier": "control"}.items()
    args = parser().parse_args(container["args"])
    assert (args.pod_user, args.dns_port, args.log_level, args.lease_name) == (None, [53, 5353], "debug", "serving")
    assert made["PodDisruptionBudget", "serving"]["spec"]["maxUnavailable"] == 2
    assert made["ServiceMonitor", "serving"]["spec"]["endpoints"][0]["port"] == "probe"
    assert ("ConfigMap", "sluice-x") in made
    for (kind, name), item in made.items():
        assert kind in ("Pod", "ConfigMap") or item["metadata"]["labels"]["team"] == "search", name
    subjects = {s["name"] for item in made.values() if item["kind"] == "RoleBinding" for s in item["subjects"]}
    assert subjects == {"sluice-sa"}


def test_who_grants_rights_himself_gets_none_made():
    made = by_kind(*VARIANTS["foreign-rights"])
    assert not {"Role", "RoleBinding", "ClusterRole", "ServiceAccount", "PodDisruptionBudget"} & {k for k, _ in made}
    (deployment,) = [item for (kind, _), item in made.items() if kind == "Deployment"]
    assert deployment["spec"]["template"]["spec"]["serviceAccountName"] == "default"


OPERATOR_MAY = {
    "prefill": {ports.ENGINE, ports.PROBE},  # PROBE: the supervisor of an engine that does not answer
    "decode": {ports.ENGINE, ports.PROBE},
    "gateway": {ports.CONTROL},
    "api server": {443, 6443},
}


@pytest.mark.parametrize("variant", [v for v, values in VARIANTS.items() if "networkPolicy.create=false" not in values])
def test_the_operators_own_policy_lets_it_reach_pods_and_api_server_and_nothing_else(variant):
    made = objects(*VARIANTS[variant])
    rules = [item for item in made if item["kind"] == "NetworkPolicy"]
    deployment = next(item for item in made if item["kind"] == "Deployment")
    operator = Pod("sluice", deployment["spec"]["template"]["metadata"]["labels"])
    others = {role.value: Pod("elsewhere", role_labels("m", role)) for role in PodRole}
    others |= {"api server": Address("172.18.0.3"), "stranger": Pod("sluice", {"app": "x"})}
    known = {22, 53, 80, 443, 6443, 8080, *(v for v in vars(ports).values() if isinstance(v, int))}
    for whom, target in others.items():
        for port in known:
            # Name servers may be anywhere, and so may the API server.
            wanted = port in OPERATOR_MAY.get(whom, set()) | {53} | OPERATOR_MAY["api server"]
            assert allows(rules, operator, target, port, "TCP") is wanted, (whom, port)
            assert allows(rules, operator, target, port, "UDP") is (port == 53), (whom, port)
            assert allows(rules, target, operator, port, "TCP") is (port == 8080), (whom, port)
    for role in PodRole:
        policies = [p for p in network_policies_of("elsewhere") if p["metadata"]["name"] == f"m-{role}"]
        for port in OPERATOR_MAY[role.value]:
            assert allows([*rules, *policies], operator, others[role.value], port, "TCP"), (role, port)


def is_leaf(namespace, item):
    try:
        return read_leaf(decode(item), "decode", "m", namespace)
    except NotOurs:
        return None


def network_policies_of(namespace):
    spec = from_json(ModelDeploymentSpec, manifest(), "spec")
    return [item for item in standing(OwnerRef(namespace, "m", "u"), spec) if item["kind"] == "NetworkPolicy"]


def test_with_the_charts_rights_alone_all_works_in_a_restricted_namespace(plane, client, namespace, nodes, crd):
    """All pods pass the restricted profile, and nothing that the operator needs is forbidden."""
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    client.merge(f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": label}})
    made = objects(namespace=namespace)
    user = f"charted-{namespace}"
    for item in made:
        if item["kind"] == "RoleBinding":
            item["subjects"] = [{"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}]
    plane.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(made))
    own = KINDS["Deployment"].path(namespace, "sluice-operator")
    client.until(own, lambda there: there.get("status", {}).get("readyReplicas") == 2)
    with OperatorProcess(plane, user, namespace, "--resync-s=5", is_admin=False) as operator:
        served = Served(client, namespace)
        # The chart does not let it, unless podMonitor.allow says so: then it does without.
        served.create(monitoring={"podMonitor": True})
        served.until_served("1")
        certificate = KINDS["Secret"].path(namespace, certificate_secret("m", PodRole.DECODE))
        client.merge(certificate, {"data": {"tls.crt": "bm9uc2Vuc2U="}})
        client.until(certificate, partial(is_leaf, namespace))
        served.roll_to("2")
        served.until_served("2")
        plane.kubectl("scale", "mdep/m", "-n", namespace, "--replicas=0")
        served.until("DecodeReady", "False", "ScaledToZero")
        served.delete()
        served.until_children("Pod", lambda pods: not pods)
        assert operator.stop() == 0
    forbidden = {r.resource for r in plane.requests() if r.user == user and r.code == 403}
    assert forbidden == {"podmonitors"}


def test_they_come_and_go_in_either_order_and_deployments_outlive_both(bare_plane):
    """helm keeps the CRD; installing it again under the same name and namespace adopts it."""
    client, namespace = bare_plane.client(), "default"

    def run(*words):
        return helm(*words, f"--namespace={namespace}", kubeconfig=bare_plane.kubeconfig)

    run("install", "crds", str(CHARTS / "sluice-crds"))
    client.until("/apis/sluice.dev/v1alpha1", bool)
    run("install", "sluice", str(CHARTS / "sluice"), *IMAGE)
    served = Served(client, namespace)
    uid = served.create()
    run("upgrade", "sluice", str(CHARTS / "sluice"), *IMAGE, "--set", "replicas=3")
    own = KINDS["Deployment"].path(namespace, "sluice-operator")
    assert client.get(own)["spec"]["replicas"] == 3
    run("rollback", "sluice", "1")
    assert client.get(own)["spec"]["replicas"] == 2
    for first, second in (("sluice", "crds"), ("crds", "sluice")):
        run("uninstall", first)
        run("uninstall", second)
        assert client.find(own) is None
        assert client.get(served.path)["metadata"]["uid"] == uid
        run("install", "crds", str(CHARTS / "sluice-crds"))
        run("install", "sluice", str(CHARTS / "sluice"), *IMAGE)
    served.delete()
    client.until(served.path, lambda there: there is None)
    run("uninstall", "sluice")
    run("uninstall", "crds")


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_helms_test_is_a_pod_that_a_restricted_namespace_takes_and_its_end_is_what_helm_says(
    plane, client, namespace, nodes, phase
):
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    client.merge(f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": label}})

    def run(*words, fails=False):
        return helm(*words, f"--namespace={namespace}", kubeconfig=plane.kubeconfig, fails=fails)

    run("install", "sluice", str(CHARTS / "sluice"), *IMAGE)
    pod = KINDS["Pod"].path(namespace, "sluice-operator-test")
    with ThreadPoolExecutor(1) as pool:
        testing = pool.submit(run, "test", "sluice", "--timeout=90s", fails=phase == "Failed")
        # Nobody runs it here: it is played until it runs, and what it would say by us.
        client.until(pod, lambda there: there is not None and there["status"]["phase"] == "Running")
        client.merge(f"{pod}/status", {"status": {"phase": phase}})
        told = testing.result(timeout=100)
    assert phase in told
    if phase == "Succeeded":
        client.until(pod, lambda there: there is None)
    run("uninstall", "sluice")


def test_what_watches_it_is_taken_where_its_kinds_are(plane, client, namespace):
    """The dashboards need nothing; PodMonitor and PrometheusRule come with the Prometheus operator."""
    values = ("--set", "monitoring.dashboards=true")
    helm(
        "install",
        "sluice",
        str(CHARTS / "sluice"),
        *IMAGE,
        *values,
        f"--namespace={namespace}",
        kubeconfig=plane.kubeconfig,
    )
    boards = client.items(f"/api/v1/namespaces/{namespace}/configmaps?labelSelector=grafana_dashboard%3D1")
    assert len(boards) == 2
    for board in boards:
        ((name, text),) = board["data"].items()
        assert json.loads(text) == json.loads((CHARTS / "sluice/monitoring/dashboards" / name).read_text())
    told = helm(
        *(
            "upgrade",
            "sluice",
            str(CHARTS / "sluice"),
            *IMAGE,
            "--set",
            "monitoring.rules=true",
            f"--namespace={namespace}",
        ),
        kubeconfig=plane.kubeconfig,
        fails=True,
    )
    assert 'no matches for kind "PrometheusRule"' in told
    helm("uninstall", "sluice", f"--namespace={namespace}", kubeconfig=plane.kubeconfig)
