"""The operator against a real API server: what it makes, leaves alone, and puts back."""

from __future__ import annotations

import time

import pytest
from cluster_deployment import condition, image_of, uids
from operator_cluster import with_tag
from operator_process import OperatorProcess

from sluice_operator.live.cluster import KINDS
from sluice_operator.names import LABEL_DEPLOYMENT, LABEL_REVISION

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

CHILD_KINDS = (
    "Deployment",
    "ControllerRevision",
    "ConfigMap",
    "Service",
    "ServiceAccount",
    "Secret",
    "PodDisruptionBudget",
    "NetworkPolicy",
    "Role",
    "RoleBinding",
)


@pytest.fixture
def operator(plane, namespace, crd):
    with OperatorProcess(plane, f"op-{namespace}", namespace) as running:
        yield running


def writes(plane, user, since):
    """What changed anything but the lease."""
    return [r for r in plane.requests() if r.user == user and r.at >= since and r.writes and r.resource != "leases"]


def test_a_deployment_becomes_ready_and_all_it_has_is_owned_by_it(operator, served):
    uid = served.create()
    served.until("Ready", "True")
    children = list(served.children(*CHILD_KINDS))
    kinds = {child["metadata"]["name"] for child in children}
    assert {"m-gateway", "m-prefill", "m-decode", "m-engine", "m-key", "m-ca"} <= kinds
    for child in children:
        assert [(o["uid"], o["controller"]) for o in child["metadata"]["ownerReferences"]] == [(uid, True)]
    there = served.client.get(served.path)
    assert "finalizers" not in there["metadata"]
    assert "annotations" not in there["metadata"]
    assert there["status"]["roles"]["decode"]["summary"] == "1/1"
    assert there["status"]["routable"] == 1


def test_when_all_is_well_it_writes_nothing(plane, operator, served):
    served.create()
    served.until("Progressing", "True", "Complete")
    # Whatever the last status brought about is over when the operator has looked again and found nothing to do.
    quiet_for(plane, operator.user, 3.0)
    began, looked = time.time(), operator.status()["reconciles"]
    served.client.merge(served.path, {"metadata": {"labels": {"touched": "1"}}})
    deadline = time.monotonic() + 60
    while operator.status()["reconciles"] < looked + 1:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    quiet_for(plane, operator.user, 3.0)
    assert writes(plane, operator.user, began) == []
    reads = [r for r in plane.requests() if r.user == operator.user and r.at >= began and r.verb in ("get", "list")]
    looks = operator.status()["reconciles"] - looked
    assert len(reads) / looks <= 20


def quiet_for(plane, user, seconds):
    deadline = time.monotonic() + 60
    while writes(plane, user, time.time() - seconds):
        assert time.monotonic() < deadline, writes(plane, user, time.time() - seconds)
        time.sleep(0.2)


def test_what_is_deleted_or_bent_is_put_right_and_what_others_added_stays(operator, served):
    served.create()
    served.until("Ready", "True")
    service = KINDS["Service"].path(served.namespace, "m-gateway")
    served.client.merge(service, {"metadata": {"annotations": {"theirs": "kept"}}, "spec": {"selector": {"a": "b"}}})
    served.client.until(service, lambda s: s["spec"]["selector"].get(LABEL_DEPLOYMENT) == "m")
    assert served.client.get(service)["metadata"]["annotations"] == {"theirs": "kept"}
    policy = KINDS["NetworkPolicy"].path(served.namespace, "m-decode")
    before = served.client.get(policy)
    served.client.delete(policy)
    after = served.client.until(policy, lambda p: p and p["metadata"]["uid"] != before["metadata"]["uid"] and p)
    assert after["spec"] == before["spec"]


def test_a_template_may_hold_any_text(operator, served):
    """The API server compares what a revision keeps byte by byte when its labels change."""
    odd = {"odd": "<a href='x?y=1&z=2'>é\u2028 😀</a>"}
    served.create(decode={"replicas": 1, "template": {"metadata": {"annotations": odd}}})
    served.until("Progressing", "True", "Complete")
    revision = next(served.children("ControllerRevision"))
    assert revision["metadata"]["labels"]["sluice.dev/verdict"] == "good"


def test_it_may_be_deleted_and_leave_what_it_made(operator, served):
    """The garbage collector takes the owner out by a strategic merge patch, which writes all of a revision anew:
    were a byte of it another then, it would be refused for ever, and the name never free again."""
    odd = {"z": "<a href='x?y=1&z=2'>é\u2028 😀\t</a>", "a": "1"}
    served.create(decode={"replicas": 1, "template": {"metadata": {"annotations": odd}}})
    served.until("Progressing", "True", "Complete")
    served.client.call("DELETE", served.path, {"propagationPolicy": "Orphan"})
    served.client.until(served.path, lambda there: there is None)
    for kind in ("ControllerRevision", "Deployment", "Pod"):
        assert list(served.children(kind))
    assert not any(child["metadata"].get("ownerReferences") for child in served.children("ControllerRevision"))


def test_a_field_that_is_no_longer_wanted_goes(operator, served):
    """Fields of a created child are owned by Apply, so that a later Apply without them removes them."""
    served.create(gateway={"replicas": 1, "service": {"annotations": {"lb": "internal", "idle": "300"}}})
    served.until("Ready", "True")
    service = KINDS["Service"].path(served.namespace, "m-gateway")
    assert served.client.get(service)["metadata"]["annotations"] == {"lb": "internal", "idle": "300"}
    served.change(gateway={"service": {"annotations": {"idle": None, "lb": "external"}}})
    served.client.until(service, lambda s: s["metadata"]["annotations"] == {"lb": "external"})


def test_a_strangers_object_stays_untouched_and_is_named(operator, served):
    theirs = {"metadata": {"name": "m-gateway"}, "spec": {"selector": {"app": "theirs"}, "ports": [{"port": 80}]}}
    service = KINDS["Service"].path(served.namespace, "m-gateway")
    made = served.client.create(KINDS["Service"].path(served.namespace), theirs)
    served.create()
    told = served.until("Accepted", "False", "NameConflict")
    assert "Service m-gateway: it belongs to something else" in told["message"]
    served.change(drain={"timeoutSeconds": 31})
    served.until("Accepted", "False", "NameConflict")
    assert served.client.get(service) == made
    served.client.delete(service)
    served.until("Ready", "True")
    assert served.client.get(service)["metadata"]["ownerReferences"][0]["kind"] == "ModelDeployment"


def test_a_strangers_secret_stays_untouched_too(operator, served):
    path = KINDS["Secret"].path(served.namespace)
    made = served.client.create(path, {"metadata": {"name": "m-key"}, "stringData": {"key": "theirs"}})
    served.create()
    served.until("Accepted", "False", "NameConflict")
    assert served.client.get(f"{path}/m-key") == made


def test_a_template_that_the_api_server_refuses_is_answered_by_a_condition(operator, served):
    container = {"name": "main", "volumeMounts": [{"name": "nowhere", "mountPath": "/x"}]}
    served.create(decode={"replicas": 1, "template": {"spec": {"containers": [container]}}})
    told = served.until("Accepted", "False", "TemplateInvalid")
    assert "volumeMounts" in told["message"]
    assert "nowhere" in told["message"]
    assert not list(served.children("Deployment"))
    served.change(decode={"template": {"spec": {"containers": [{"name": "main"}]}}})
    served.until("Ready", "True")


TYPO = {"spec": {"tolerationz": [{"key": "a"}], "containers": [{"name": "proxy", "image": "x", "portz": []}]}}


def test_a_field_that_no_pod_has_is_refused_with_its_path_and_what_runs_goes_on(operator, served):
    served.create()
    served.until("Ready", "True")
    before = uids(served.engines())
    for role in ("decode", "gateway"):
        served.change(**{role: {"template": TYPO}})
        told = served.until("Accepted", "False", "TemplateInvalid")
        assert f"spec.{role}.template.spec.tolerationz" in told["message"]
        assert f"spec.{role}.template.spec.containers[0].portz" in told["message"]
        assert "is no field that this cluster has" in told["message"]
        served.change(**{role: {"template": None}})
        served.until("Accepted", "True")
    served.until("Ready", "True")
    assert uids(served.engines()) == before


def test_fields_that_an_earlier_operator_accepted_are_warned_of_and_served(plane, namespace, served, fleet):
    options = (f"op-{namespace}", namespace, f"--dial={fleet.dial}")
    typo = {"template": {"spec": {"tolerationz": [{"key": "a"}]}}}
    with OperatorProcess(plane, *options, "--lenient") as earlier:
        served.create(decode={"replicas": 1} | typo, gateway={"replicas": 1} | typo)
        served.until("Ready", "True")
        assert earlier.stop() == 0
    before = uids(served.engines())
    with OperatorProcess(plane, *options):
        served.client.until(served.path, lambda there: "tolerationz" in condition(there, "Accepted")["message"])
        told = served.condition("Accepted")
        assert told["status"] == "True"
        for role in ("decode", "gateway"):
            assert f"spec.{role}.template.spec.tolerationz" in told["message"]
        served.change(decode={"replicas": 2})
        served.until("Ready", "True")
    assert before < uids(served.engines())


def test_what_a_quota_refuses_is_told_in_the_api_servers_words_and_tried_again(operator, served):
    """It was 403 for ever, and the status said that it was scaling."""
    quota = {"metadata": {"name": "tight"}, "spec": {"hard": {"count/configmaps": "0"}}}
    path = f"/api/v1/namespaces/{served.namespace}/resourcequotas"
    served.client.create(path, quota)
    served.client.until(f"{path}/tight", lambda q: q.get("status", {}).get("hard"))
    served.create()
    told = served.until("Progressing", "False", "WriteRefused")
    assert "exceeded quota: tight" in told["message"]
    assert served.until("Ready", "False", "WriteRefused")
    served.client.delete(f"{path}/tight")
    served.until("Ready", "True")
    served.until("Progressing", "True", "Complete")


def webhook(namespace, resource, group=""):
    """One that is down, and that the API server asks for this resource in this namespace."""
    rule = {"apiGroups": [group], "apiVersions": ["v1"], "resources": [resource], "operations": ["*"]}
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": f"down-{resource}-{namespace}"},
        "webhooks": [
            {
                "name": "down.example.com",
                "clientConfig": {"url": "https://127.0.0.1:1/"},
                "rules": [rule],
                "failurePolicy": "Fail",
                "sideEffects": "None",
                "admissionReviewVersions": ["v1"],
                "timeoutSeconds": 1,
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
            }
        ],
    }


WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"


@pytest.mark.parametrize(("resource", "group"), [("services", ""), ("deployments", "apps")])
def test_a_webhook_that_is_down_is_told_of_and_what_it_bars_is_tried_again(operator, served, resource, group):
    """The API server answers 500 for it: a new ModelDeployment had no status at all."""
    made = webhook(served.namespace, resource, group)
    served.client.create(WEBHOOKS, made)
    try:
        served.create()
        told = served.until("Progressing", "False", "WriteRefused")
        assert "down.example.com" in told["message"]
    finally:
        served.client.delete(f"{WEBHOOKS}/{made['metadata']['name']}")
    served.until("Ready", "True")


def test_events_that_nobody_may_write_hold_up_nothing(operator, served):
    served.create()
    served.until("Ready", "True")
    made = webhook(served.namespace, "events")
    served.client.create(WEBHOOKS, made)
    try:
        (decode,) = [pod for pod in served.engines() if pod["metadata"]["labels"]["sluice.dev/role"] == "decode"]
        crash = {"sluice.test/fail": "died: leader: MemoryError", "sluice.test/exit": "1"}
        path = KINDS["Pod"].path(served.namespace, decode["metadata"]["name"])
        served.client.merge(path, {"metadata": {"annotations": crash}})
        served.until_status(lambda status: [told["reason"] for told in status["incidents"]] == ["Died"])
        served.client.merge(path, {"metadata": {"annotations": dict.fromkeys(crash)}})
        served.until("Ready", "True")
    finally:
        served.client.delete(f"{WEBHOOKS}/{made['metadata']['name']}")


def test_a_key_that_is_deleted_during_a_pause_is_written_again(operator, served):
    served.create()
    served.until("Ready", "True")
    served.change(paused=True)
    path = KINDS["Secret"].path(served.namespace, "m-key")
    before = served.client.get(path)["data"]
    served.client.delete(path)
    served.change(drain={"timeoutSeconds": 31})  # Secrets are not watched: it is seen at the next look
    again = served.client.until(path, lambda there: there)
    assert again["data"] == before


def test_what_is_no_longer_wanted_goes_and_what_others_add_to_a_selector_too(operator, served):
    """A removed annotation stayed for ever; a Service that selected nobody any more read as ours, and Ready."""
    served.create(gateway={"replicas": 1, "service": {"annotations": {"a": "1", "b": "2"}}})
    served.until("Ready", "True")
    path = KINDS["Service"].path(served.namespace, "m-gateway")
    policy = KINDS["NetworkPolicy"].path(served.namespace, "m-gateway")
    selector = served.client.get(path)["spec"]["selector"]
    chosen = served.client.get(policy)["spec"]["podSelector"]
    served.change(gateway={"service": {"annotations": {"a": None}}})

    def annotations(there):
        return {key: value for key, value in there["metadata"].get("annotations", {}).items() if key in ("a", "b", "c")}

    served.client.until(path, lambda there: annotations(there) == {"b": "2"})
    # What others add is theirs, where it changes nothing of what we mean.
    added = {"metadata": {"annotations": {"c": "3"}}, "spec": {"selector": {"foo": "bar"}}}
    served.client.merge(path, added)
    served.client.until(path, lambda there: there["spec"]["selector"] == selector)
    assert annotations(served.client.get(path)) == {"b": "2", "c": "3"}
    served.client.merge(policy, {"spec": {"podSelector": {"matchLabels": {"foo": "bar"}}}})
    served.client.until(policy, lambda there: there["spec"]["podSelector"] == chosen)
    # And then there is peace.
    quiet = served.client.get(path)["metadata"]["resourceVersion"]
    looked = operator.status()["reconciles"]
    served.change(drain={"timeoutSeconds": 31})
    operator.until(lambda status: status["reconciles"] >= looked + 3)
    assert served.client.get(path)["metadata"]["resourceVersion"] == quiet


def test_pods_that_nobody_may_make_are_told_of_in_the_words_of_who_refuses_them(operator, served):
    """It said Starting, and to wait, for ever: a ReplicaSet tells its Deployment alone."""
    served.create(decode={"replicas": 1, "template": {"spec": {"priorityClassName": "not-there"}}})
    told = served.until("DecodeReady", "False", "PodsRefused")
    assert "no PriorityClass with name not-there was found" in told["message"]
    served.until("PrefillReady", "True")
    served.change(decode={"template": None})
    served.until("Ready", "True")


def test_a_rollout_replaces_every_engine_and_never_by_editing_a_template(operator, served):
    served.create(prefill={"replicas": 2}, decode={"replicas": 2})
    served.until_served("1")
    old = {d["metadata"]["name"]: d["spec"]["template"] for d in served.children("Deployment")}
    served.roll_to("2")
    served.until_served("2")
    assert len(served.engines()) == 4
    assert condition(served.client.get(served.path), "Degraded")["status"] == "False"
    for deployment in served.children("Deployment"):
        name = deployment["metadata"]["name"]
        assert name == "m-gateway" or name not in old or deployment["spec"]["template"] == old[name]
    revisions = {d["metadata"]["labels"][LABEL_REVISION] for d in served.children("ControllerRevision")}
    assert len(revisions) == 2


def test_a_restart_of_engines_by_hand_is_refused_and_by_force_ends_none(plane, operator, served):
    """Before: the Deployment controller ended all engines of the role at once."""
    served.create(prefill={"replicas": 1}, decode={"replicas": 2})
    served.until("Ready", "True")
    before = uids(served.engines())
    held = [d for d in served.children("Deployment") if "gateway" not in d["metadata"]["name"]]
    assert len(held) == 2
    for deployment in held:
        name, path = (
            deployment["metadata"]["name"],
            KINDS["Deployment"].path(served.namespace, deployment["metadata"]["name"]),
        )
        served.client.until(path, lambda there: there["spec"].get("paused"))
        told = plane.kubectl("rollout", "restart", f"deployment/{name}", "-n", served.namespace, fails=True)
        assert "paused" in told
        edit = {"spec": {"template": {"metadata": {"annotations": {"kubectl.kubernetes.io/restartedAt": "now"}}}}}
        served.client.call("PATCH", path, edit, "application/strategic-merge-patch+json")
        served.client.until(
            path,
            lambda there: (
                "kubectl.kubernetes.io/restartedAt" not in there["spec"]["template"]["metadata"].get("annotations", {})
            ),
        )
    quiet_for(plane, operator.user, 5.0)
    assert uids(served.engines()) == before
    # What was put back is the template that the ReplicaSet has: letting go ends nothing either.
    for deployment in held:
        plane.kubectl("rollout", "resume", f"deployment/{deployment['metadata']['name']}", "-n", served.namespace)
    for deployment in held:
        path = KINDS["Deployment"].path(served.namespace, deployment["metadata"]["name"])
        served.client.until(path, lambda there: there["spec"].get("paused"))
    assert uids(served.engines()) == before
    events = served.client.items(KINDS["Event"].path(served.namespace) + "?fieldSelector=reason=TemplateEdited")
    assert len(list(events)) >= 1


RESTORED = ("Deployment", "ConfigMap", "ControllerRevision", "Service", "ServiceAccount", "NetworkPolicy")


def test_children_that_were_restored_without_owners_are_adopted(plane, operator, served):
    """As after a restore by a backup tool. No pod is replaced, and nothing is left without its owner."""
    served.create(prefill={"replicas": 1}, decode={"replicas": 2})
    served.until("Ready", "True")
    before = uids(served.engines())
    for kind in RESTORED:
        for child in served.children(kind):
            path = KINDS[kind].path(served.namespace, child["metadata"]["name"])
            body = {"metadata": {"ownerReferences": None}}
            served.client.call("PATCH", path, body, "application/merge-patch+json")
    for kind in RESTORED:
        served.until_children(kind, lambda items: all(item["metadata"].get("ownerReferences") for item in items))
    served.until("Ready", "True")
    assert uids(served.engines()) == before


def test_a_pod_that_crashes_is_told_with_its_last_words(operator, served):
    served.create()
    served.until("Ready", "True")
    pod = KINDS["Pod"].path(served.namespace, served.engines()[0]["metadata"]["name"])
    served.client.merge(pod, {"metadata": {"annotations": {"sluice.test/fail": "Wedged: rank 0 in step 7"}}})
    served.until("Ready", "False", "CrashLoop")
    incident = served.client.get(served.path)["status"]["incidents"][0]
    assert incident["message"] == "Wedged: rank 0 in step 7"
    events = served.client.items(KINDS["Event"].path(served.namespace) + "?fieldSelector=involvedObject.name=m")
    assert [e["reason"] for e in events if e["type"] == "Warning"] == ["EngineDied"]


def test_a_revision_that_crashes_is_taken_back_and_the_good_one_serves_on(operator, served):
    served.create(prefill={"replicas": 1}, decode={"replicas": 2})
    served.until_served("1")
    crashing = {"sluice.test/fail": "bad weights", "sluice.test/restarts": "3"}
    served.change(image=with_tag("2"), decode={"template": {"metadata": {"annotations": crashing}}})
    told = served.until("Progressing", "False", "RolledBack")
    assert "CrashLoop" in told["message"]
    served.until_children("Pod", lambda pods: [image_of(p)[-1] for p in pods].count("2") == 0)
    # The crashes are told of, and nothing worse: what serves is whole.
    assert served.condition("Degraded")["reason"] == "RecentIncidents"
    events = served.client.items(KINDS["Event"].path(served.namespace) + "?fieldSelector=reason=RolledBack")
    assert "bad weights" in events[0]["message"]
    served.change(decode={"template": {"metadata": {"annotations": None}}})
    served.until_served("2")


def test_requests_that_wait_wake_a_deployment_that_sleeps(plane, served, namespace, tmp_path):
    world = tmp_path / "world"
    world.write_text("{}")
    with OperatorProcess(plane, f"op-{namespace}", namespace, f"--world={world}"):
        served.create(decode={"replicas": 0, "scaling": {"mode": "Auto", "auto": {"minReplicas": 0, "maxReplicas": 3}}})
        served.until("DecodeReady", "False", "ScaledToZero")
        world.write_text('{"queued": 3, "queue_age_ms": 900}')
        served.until("Ready", "True")
        there = served.client.get(served.path)
        told = [(d["fromReplicas"], d["toReplicas"], d["reason"]) for d in there["status"]["scaling"]["decisions"]]
        assert (0, 1, "FromZero") in told
        assert there["spec"]["decode"]["replicas"] >= 1


def test_a_kind_that_the_cluster_has_not_is_done_without(plane, operator, served):
    """No Prometheus operator here."""
    served.create(monitoring={"podMonitor": True})
    served.until("Progressing", "True", "Complete")
    quiet_for(plane, operator.user, 5.0)
    assert "this cluster has no PodMonitor" in operator.text()
    told = served.until("Degraded", "True", "MonitoringUnavailable")
    assert "This cluster has no PodMonitor" in told["message"]


def test_gateways_that_somebody_changes_are_put_back_and_what_is_added_is_left_in_peace(plane, operator, served):
    served.create()
    served.until("Ready", "True")
    path = KINDS["Deployment"].path(served.namespace, "m-gateway")
    (main,) = served.client.get(path)["spec"]["template"]["spec"]["containers"]

    def patched(*containers):
        told = {"spec": {"template": {"spec": {"containers": list(containers)}}}}
        served.client.call("PATCH", path, told, "application/strategic-merge-patch+json")

    def is_as_it_was(there):
        (container, *_) = [c for c in there["spec"]["template"]["spec"]["containers"] if c["name"] == main["name"]]
        return (container["image"], container["command"]) == (main["image"], main["command"])

    patched({"name": main["name"], "image": "evil:1", "command": ["sh"]})
    served.client.until(path, is_as_it_was)
    patched({"name": main["name"], "args": ["--more"]}, {"name": "stranger", "image": "proxy:1"})
    served.until("Progressing", "True", "Complete")
    quiet_for(plane, operator.user, 5.0)
    names = {c["name"] for c in served.client.get(path)["spec"]["template"]["spec"]["containers"]}
    assert names == {main["name"], "stranger"}


def test_gateways_may_be_scaled_by_somebody_else(plane, operator, served):
    """gateway.scaling.mode External: what an HPA on the Deployment does stays, also over a new template."""
    served.create(gateway={"replicas": 1, "scaling": {"mode": "External"}})
    served.until("Ready", "True")
    plane.kubectl("scale", "deployment/m-gateway", "-n", served.namespace, "--replicas=3")
    served.until_status(lambda status: status["roles"]["gateway"]["summary"] == "3/3")
    served.change(gateway={"replicas": 1, "scaling": {"mode": "External"}, "maxQueued": 77})
    path = KINDS["Deployment"].path(served.namespace, "m-gateway")
    served.client.until(path, lambda there: "77" in str(there["spec"]["template"]["spec"]["containers"][0]["command"]))
    served.until("Ready", "True")
    assert served.client.get(path)["spec"]["replicas"] == 3


def test_scale_to_zero_and_back(plane, operator, served):
    served.create()
    served.until("Ready", "True")
    plane.kubectl("scale", "mdep/m", "-n", served.namespace, "--replicas=0")
    served.until("DecodeReady", "False", "ScaledToZero")
    served.until_children("Pod", lambda pods: not [p for p in pods if "decode" in p["metadata"]["name"]])
    plane.kubectl("scale", "mdep/m", "-n", served.namespace, "--replicas=2")
    served.until("Ready", "True")
    assert served.client.get(served.path)["status"]["roles"]["decode"]["summary"] == "2/2"


def test_operators_of_different_versions_take_turns_and_restart_no_engine(plane, operator, served, namespace):
    """What was rendered for a revision stays as it is; the next revision is as whoever leads then would have it."""
    served.create()
    served.until("Ready", "True")
    before, ours = uids(served.engines()), graces(served)
    gateway = KINDS["Deployment"].path(namespace, "m-gateway")
    newer = ("--control-image=registry.local/sluice-control:2", "--other-defaults")
    with OperatorProcess(plane, f"newer-{namespace}", namespace, *newer) as later:
        later.wait_for("standby")
        assert operator.stop() == 0
        later.wait_for("leading")
        served.client.until(gateway, lambda d: d["spec"]["template"]["spec"]["containers"][0]["image"].endswith(":2"))
        served.change(decode={"replicas": 2})
        served.until("Ready", "True")
        # The pod that was added is of the old rendering too: it is of the old revision.
        assert uids(served.engines()) > before
        assert graces(served) == ours
        grown = uids(served.engines())
        operator.start()
        operator.wait_for("standby")
        assert later.stop() == 0
        operator.wait_for("leading")
        served.client.until(gateway, lambda d: d["spec"]["template"]["spec"]["containers"][0]["image"].endswith(":1"))
        served.until("Ready", "True")
        assert uids(served.engines()) == grown
        later.start()
        later.wait_for("standby")
        assert operator.stop() == 0
        served.roll_to("2")
        served.until_served("2")
        assert graces(served) == {grace + 30 for grace in ours}


def graces(served):
    return {pod["spec"]["terminationGracePeriodSeconds"] for pod in served.engines()}


def test_it_waits_for_the_crd_and_gives_its_lease_back(bare_plane):
    client = bare_plane.client()
    with OperatorProcess(bare_plane, "early", "default") as early:
        early.wait_for("waiting for the CRD")
        bare_plane.install_crd()
        early.wait_for("leading")
        lease = KINDS["Lease"].path("default", "sluice-operator")
        assert client.get(lease)["spec"]["holderIdentity"]
        assert early.stop() == 0
        assert client.get(lease)["spec"]["holderIdentity"] in ("", None)
