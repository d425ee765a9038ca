"""Every reason that a condition, decision or event can give: what it means and what to do. docs/kubernetes.md and the
messages come from here; a reason that is not in the table cannot be told (`Reason` is its key)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from sluice_operator.api.status import MAX_MESSAGE

# Left for what stands before a message, such as "1/2 pods are ready."
PREFIX_ROOM = 64


class Reason(StrEnum):
    # Accepted
    ACCEPTED = "Accepted"
    SPEC_INVALID = "SpecInvalid"
    TEMPLATE_INVALID = "TemplateInvalid"
    TENSOR_UNSUPPORTED = "TensorUnsupported"
    OPERATOR_DEFECT = "OperatorDefect"
    NAME_CONFLICT = "NameConflict"
    NAME_IN_USE = "NamesakeEnding"
    # Placed
    PLACED = "Placed"
    NODES_UNKNOWN = "NodesUnknown"
    NO_NODE_MATCHES = "NoNodeMatches"
    CLAIMS_UNAVAILABLE = "ClaimsUnavailable"
    TENSOR_EXCEEDS_NODE = "TensorExceedsNode"
    DOMAIN_TOO_SMALL = "DomainTooSmall"
    UNSCHEDULABLE = "Unschedulable"
    # PrefillReady, DecodeReady, GatewayReady
    ALL_READY = "AllReady"
    SCALED_TO_ZERO = "ScaledToZero"
    STARTING = "Starting"
    PODS_REFUSED = "PodsRefused"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    CONTAINER_CONFIG_ERROR = "ContainerConfigError"
    CRASH_LOOP = "CrashLoop"
    STARTUP_TIMED_OUT = "StartupTimedOut"
    ENDED_BY_NODE = "EndedByNode"
    NOT_READY = "NotReady"
    # Routable
    ROUTED = "Routed"
    NO_GATEWAY_REPORT = "NoGatewayReport"
    NO_PAIR = "NoPair"
    # Progressing
    COMPLETE = "Complete"
    ROLLING_OUT = "RollingOut"
    SCALING = "Scaling"
    NOT_ROUTED = "NotRouted"
    SURGE_UNSCHEDULABLE = "SurgeUnschedulable"
    ROLLED_BACK = "RolledBack"
    WRITE_REFUSED = "WriteRefused"
    PAUSED = "Paused"
    NOT_ACCEPTED = "NotAccepted"
    # Degraded
    HEALTHY = "Healthy"
    PODS_QUARANTINED = "PodsQuarantined"
    RECENT_INCIDENTS = "RecentIncidents"
    BELOW_CAPACITY = "BelowCapacity"
    MONITORING_UNAVAILABLE = "MonitoringUnavailable"
    # Ready
    READY = "Ready"


@dataclass(frozen=True, slots=True)
class Entry:
    """`conditions`: where the reason is met. `remedy`: empty where nothing has to be done."""

    conditions: str
    meaning: str
    remedy: str = ""


_ENGINES = "PrefillReady, DecodeReady, GatewayReady"

REASONS: Mapping[Reason, Entry] = {
    Reason.ACCEPTED: Entry("Accepted", "The spec can be served."),
    Reason.SPEC_INVALID: Entry(
        "Accepted",
        "A field holds what the API server should have refused.",
        "Correct the field that the message names.",
    ),
    Reason.TEMPLATE_INVALID: Entry(
        "Accepted",
        "A pod template sets what is the operator's, or what the API server refuses.",
        "Remove or correct the path that the message names; what runs goes on meanwhile.",
    ),
    Reason.TENSOR_UNSUPPORTED: Entry(
        "Accepted", "parallelism.tensor above 1 is not there yet.", "Set parallelism.tensor to 1."
    ),
    Reason.OPERATOR_DEFECT: Entry(
        "Accepted",
        "The operator fails over this spec, which it should not; its own error follows. What runs goes on.",
        "Undo the last change of the spec, and report the error with the operator's log.",
    ),
    Reason.NAME_CONFLICT: Entry(
        "Accepted",
        "An object that is not ours has a name that we need; it is left alone.",
        "Delete or rename that object, or rename the ModelDeployment.",
    ),
    Reason.NAME_IN_USE: Entry(
        "Accepted",
        "Children of a deleted ModelDeployment of this name are still ending.",
        "Wait; if a pod hangs in Terminating, look at its node.",
    ),
    Reason.PLACED: Entry("Placed", "There are nodes for these pods."),
    Reason.NODES_UNKNOWN: Entry(
        "Placed",
        "The operator may not see nodes, so it cannot say whether any matches.",
        "Install the chart's optional node role, or see the pods' own events.",
    ),
    Reason.NO_NODE_MATCHES: Entry(
        "Placed",
        "No node fulfils all requirements; status.placement.reasons counts them.",
        "Correct spec.accelerator or the template's selectors, or add nodes (`sluice plan --nodes` tries offline).",
    ),
    Reason.CLAIMS_UNAVAILABLE: Entry(
        "Placed",
        "allocation ResourceClaim needs ResourceClaimTemplates of resource.k8s.io/v1: Kubernetes 1.34 or later.",
        "Set accelerator.gpu.allocation to DevicePlugin, or upgrade the cluster.",
    ),
    Reason.TENSOR_EXCEEDS_NODE: Entry(
        "Placed", "No matching node has as many GPUs as one engine has ranks.", "Lower parallelism.tensor."
    ),
    Reason.DOMAIN_TOO_SMALL: Entry(
        "Placed",
        "Policy Required, and no NVLink domain has GPUs for all engines.",
        "Set accelerator.gpu.domain.policy to Preferred, or ask for fewer replicas.",
    ),
    Reason.UNSCHEDULABLE: Entry(
        "Placed", "The scheduler finds no place for a pod; its own words follow.", "Free or add what it names."
    ),
    Reason.ALL_READY: Entry(_ENGINES, "As many pods are ready as are wanted."),
    Reason.SCALED_TO_ZERO: Entry(
        _ENGINES,
        "No pods of this role are wanted.",
        "Raise spec.prefill.replicas or spec.decode.replicas; with mode Auto and minReplicas 0 a request does it.",
    ),
    Reason.STARTING: Entry(
        _ENGINES, "Pods are starting or loading the model.", "Wait; probes.startupMaxSeconds bounds it."
    ),
    Reason.PODS_REFUSED: Entry(
        _ENGINES,
        "The API server lets nobody make these pods (a quota, a priority class that is not there, an admission webhook,"
        " pod security). Its words follow.",
        "Correct what they name, in the role's template or in the cluster; Kubernetes tries again within minutes.",
    ),
    Reason.IMAGE_PULL_FAILED: Entry(
        _ENGINES,
        "An image cannot be pulled.",
        "Correct spec.image (repository, tag or digest, pullSecrets), or the image of the container that the message"
        " names in the role's template.",
    ),
    Reason.CONTAINER_CONFIG_ERROR: Entry(
        _ENGINES, "A Secret or ConfigMap that the pod wants is missing.", "Create what the message names."
    ),
    Reason.CRASH_LOOP: Entry(
        _ENGINES,
        "The container ends again and again; its last words follow.",
        "See status.incidents and the pod's log.",
    ),
    Reason.ENDED_BY_NODE: Entry(
        _ENGINES,
        "Nodes end new pods of this role, or do not take them; the node's own words follow.",
        "Look at what the words name: ephemeral storage, memory, a device; ask for less, or correct the node.",
    ),
    Reason.STARTUP_TIMED_OUT: Entry(
        _ENGINES,
        "A pod was not ready within probes.startupMaxSeconds.",
        "Raise it if the model is large; else see the pod's log. Of a pod that waits, `kubectl describe pod` tells what"
        " for: a volume whose Secret, ConfigMap or claim is missing (FailedMount), its network, a device.",
    ),
    Reason.NOT_READY: Entry(_ENGINES, "Fewer pods are ready than are wanted.", "See the pod that the message names."),
    Reason.ROUTED: Entry("Routable", "Every ready gateway routes to a pair of this revision."),
    Reason.NO_GATEWAY_REPORT: Entry(
        "Routable",
        "It is not known what the gateways route to: a ready gateway has not reported, or no gateway is ready.",
        "See GatewayReady. If it is True, see the gateway's log: the operator must reach its control port"
        " (NetworkPolicy).",
    ),
    Reason.NO_PAIR: Entry(
        "Routable",
        "No prefill and decode engine with equal fingerprints are known to all ready gateways.",
        "See PrefillReady and DecodeReady; if both are True, the gateway's log says why it refuses them.",
    ),
    Reason.COMPLETE: Entry("Progressing", "Only the wanted revision runs, in the wanted number."),
    Reason.ROLLING_OUT: Entry("Progressing", "Pods of the wanted revision replace older ones."),
    Reason.SCALING: Entry("Progressing", "The number of pods is being changed."),
    Reason.NOT_ROUTED: Entry(
        "Progressing",
        "An engine has been ready for a minute, and a gateway does not route to it; nothing that serves is taken away"
        " meanwhile.",
        "See that gateway's log and /status: it must reach the engine's control port (NetworkPolicy, certificates).",
    ),
    Reason.SURGE_UNSCHEDULABLE: Entry(
        "Progressing",
        "Pods of the wanted revision find no node.",
        "Make room for the pods that the message names: with rollout.maxSurge 1 a rollout needs one pod more of each"
        " role. With maxSurge 0 and maxUnavailable 1 an older pod ends first, and needs none.",
    ),
    Reason.ROLLED_BACK: Entry(
        "Progressing",
        "Pods of the wanted revision failed, so the last good one serves. It stays so until the spec changes.",
        "Correct what the message names in the spec. For a cause outside of it (registry, Secret, quota), correct"
        " that and try again with `kubectl label controllerrevision -n NAMESPACE NAME-REVISION sluice.dev/verdict-`.",
    ),
    Reason.WRITE_REFUSED: Entry(
        "Progressing",
        "The API server refuses something that this deployment needs (quota, policy, webhook, right, value); what comes"
        " after it waits. Its words follow.",
        "Correct what they name (labels: spec.metadata); it is tried again by itself.",
    ),
    Reason.PAUSED: Entry("Progressing", "spec.paused is true: nothing but status changes.", "Set paused to false."),
    Reason.NOT_ACCEPTED: Entry(
        f"Placed, {_ENGINES}, Progressing",
        "The spec is not accepted, so nothing is changed.",
        "See the condition Accepted.",
    ),
    Reason.HEALTHY: Entry("Degraded", "Nothing is known to be wrong."),
    Reason.PODS_QUARANTINED: Entry(
        "Degraded",
        "Wedged pods are kept for somebody to look at.",
        "Run `sluice doctor` on the bundle; they go by themselves after quarantine.maxSeconds.",
    ),
    Reason.RECENT_INCIDENTS: Entry(
        "Degraded", "Engines died or froze within the last 10 minutes.", "See status.incidents."
    ),
    Reason.BELOW_CAPACITY: Entry(
        "Degraded",
        "Fewer pairs serve than rollout.maxUnavailable allows.",
        "See PrefillReady, DecodeReady and Progressing.",
    ),
    Reason.MONITORING_UNAVAILABLE: Entry(
        "Degraded",
        "monitoring.podMonitor is true, and no PodMonitor can be made: nobody scrapes. Requests are answered.",
        "Install the Prometheus operator's CRDs and the chart with podMonitor.allow=true, or set it to false.",
    ),
    Reason.READY: Entry("Ready", "Requests are answered."),
}


def tell(reason: Reason, detail: str = "", remedy: str | None = None) -> str:
    """What a condition's message says: meaning, detail, remedy. It is the detail that is cut where all is too long.
    `remedy`: what to do in this very case; None: what the table says."""
    entry = REASONS[reason]
    end = entry.remedy if remedy is None else remedy
    room = MAX_MESSAGE - PREFIX_ROOM - len(entry.meaning) - len(end)
    return " ".join(part for part in (entry.meaning, cut(detail, room), end) if part)


def sentence(words: str) -> str:
    """Words of others, which may end in a full stop or not, as a sentence that ends in one."""
    text = words.strip()
    return text if not text or text.endswith("...") else f"{text.rstrip('.:; ')}."


def cut(text: str, room: int) -> str:
    """At most `room` characters of it."""
    return text if len(text) <= room else f"{text[: max(0, room - 3)]}..."


def render_table() -> str:
    """Markdown: the table of docs/modeldeployment.md."""
    rows = [f"| `{r}` | {e.conditions} | {e.meaning} | {e.remedy or '-'} |" for r, e in REASONS.items()]
    return "\n".join(["| reason | condition | meaning | what to do |", "| --- | --- | --- | --- |", *rows]) + "\n"


# Order of the links, then what is told beside them; a command that shows more.
_SECTIONS: Mapping[str, str] = {
    "Accepted": "kubectl describe mdep NAME",
    "Placed": "kubectl get mdep NAME -o jsonpath='{.status.placement}'",
    _ENGINES: "kubectl get pods -l sluice.dev/deployment=NAME -L sluice.dev/role",
    "Routable": "kubectl logs -l sluice.dev/deployment=NAME,sluice.dev/role=gateway",
    "Progressing": "kubectl get controllerrevisions -l sluice.dev/deployment=NAME --show-labels",
    "Degraded": "kubectl get mdep NAME -o jsonpath='{.status.incidents}'",
    "Ready": "kubectl get mdep NAME",
}
_TROUBLE = """\
# Troubleshooting by reason

<!-- Generated from operator/sluice_operator/decide/reasons.py by tools/house/generate.py (`make proto`). -->

`kubectl get mdep` shows as REASON the first of Accepted, Placed, PrefillReady, DecodeReady, GatewayReady and Routable
that is not True: look there first, the later ones follow from it. `kubectl describe mdep NAME` has the message: what,
where, what to do. Reasons of engines that died or are wedged: [health.md](../health.md#what-to-do-for-each-reason).
"""


def render_troubleshooting() -> str:
    """Markdown: docs/kubernetes/troubleshooting.md, a table per condition, or per three that share their reasons."""
    parts, seen = [_TROUBLE], set[Reason]()
    for conditions, command in _SECTIONS.items():
        met = set(conditions.split(", "))
        rows = [(r, e) for r, e in REASONS.items() if r not in seen and met & set(e.conditions.split(", "))]
        seen |= {reason for reason, _ in rows}
        parts += [
            f"## {conditions}\n",
            f"```sh\n{command}\n```\n",
            "| reason | meaning | what to do |",
            "| --- | --- | --- |",
        ]
        parts += [f"| `{reason}` | {entry.meaning} | {entry.remedy or '-'} |" for reason, entry in rows]
        parts.append("")
    return "\n".join(parts)
