"""What plan wants done, as values. Each is idempotent, and each leaves a state from which plan goes on.

Carried out in order by apply. A failed precondition (uid, resourceVersion) is no error: the next plan sees why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sluice_operator.api.status import ModelDeploymentStatus
from sluice_operator.decide.observed import Memory
from sluice_operator.keys.rotation import Step
from sluice_operator.names import PodRole, Verdict


@dataclass(frozen=True, slots=True)
class Apply:
    """Server-side apply of a whole child. Never of one whose ownerRef is not ours."""

    object: Mapping[str, Any]

    def __str__(self) -> str:
        return f"apply {self.object['kind']} {self.object['metadata']['name']}"


@dataclass(frozen=True, slots=True)
class Scale:
    """Set a Deployment's replicas, with the resourceVersion that was seen as precondition."""

    workload: str
    role: PodRole
    revision: str
    replicas: int
    was: int
    resource_version: str

    def __str__(self) -> str:
        return f"scale Deployment {self.workload} from {self.was} to {self.replicas}"


@dataclass(frozen=True, slots=True)
class Drain:
    """Engine/Drain: refuse new rooms, finish what runs, report empty."""

    pod: str
    uid: str

    def __str__(self) -> str:
        return f"drain Pod {self.pod}"


@dataclass(frozen=True, slots=True)
class SetServing:
    """Write the readiness gate's condition in the pod's status."""

    pod: str
    uid: str
    serving: bool

    def __str__(self) -> str:
        return f"{'open' if self.serving else 'close'} readiness gate of Pod {self.pod}"


@dataclass(frozen=True, slots=True)
class ReleasePod:
    """Take a quarantined pod out of its ReplicaSet: drop the revision label, add the quarantine label and an ownerRef
    of the ModelDeployment, in one patch with the uid as precondition."""

    pod: str
    uid: str
    resource_version: str

    def __str__(self) -> str:
        return f"quarantine Pod {self.pod}"


@dataclass(frozen=True, slots=True)
class Delete:
    """With uid (and resourceVersion, unless empty) as preconditions; background propagation."""

    kind: str
    name: str
    uid: str
    resource_version: str = ""

    def __str__(self) -> str:
        return f"delete {self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class MarkRevision:
    """Write the verdict labels of a ControllerRevision. `detail`: the pod that failed and its last words."""

    name: str
    verdict: Verdict
    reason: str = ""
    detail: str = ""

    def __str__(self) -> str:
        return f"mark ControllerRevision {self.name} {self.verdict.value or 'unknown'} {self.reason}".rstrip()


@dataclass(frozen=True, slots=True)
class Hold:
    """Pause a Deployment, with the resourceVersion that was seen as precondition."""

    workload: str
    resource_version: str

    def __str__(self) -> str:
        return f"hold Deployment {self.workload}"


@dataclass(frozen=True, slots=True)
class Adopt:
    """Make an ownerless object ours, with the resourceVersion that was seen as precondition."""

    kind: str
    name: str
    uid: str
    resource_version: str

    def __str__(self) -> str:
        return f"adopt {self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class PutBack:
    """Replace a Deployment's pod template by what its revision keeps."""

    workload: str
    resource_version: str
    template: Mapping[str, Any]

    def __str__(self) -> str:
        return f"put back the template of Deployment {self.workload}"


@dataclass(frozen=True, slots=True)
class Label:
    """Change labels and annotations of a child, by a merge patch of its metadata."""

    kind: str
    name: str
    uid: str
    change: Mapping[str, Any]

    def __str__(self) -> str:
        return f"label {self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class EnsureSecret:
    """Make the shared key where there is none, or a Secret of ours without one: plan cannot, being pure."""

    name: str

    def __str__(self) -> str:
        return f"make Secret {self.name}"


@dataclass(frozen=True, slots=True)
class Certify:
    """Make or change the Secret of a CA or of a role, if it is as it was seen."""

    step: Step

    def __str__(self) -> str:
        return str(self.step)


@dataclass(frozen=True, slots=True)
class SetDecodeReplicas:
    """Write spec.decode.replicas through /scale: mode Auto only."""

    replicas: int
    was: int

    def __str__(self) -> str:
        return f"set spec.decode.replicas from {self.was} to {self.replicas}"


@dataclass(frozen=True, slots=True)
class Tell:
    """An Event. `id`: equal for equal news, part of the Event's name, so that a second time changes nothing."""

    reason: str
    message: str
    id: str
    warning: bool = False

    def __str__(self) -> str:
        return f"event {self.reason}: {self.message}"


@dataclass(frozen=True, slots=True)
class WriteStatus:
    status: ModelDeploymentStatus

    def __str__(self) -> str:
        return f"write status: {self.status.reason or 'Ready'}"


@dataclass(frozen=True, slots=True)
class Remember:
    """Hand this back in the next Observed."""

    memory: Memory

    def __str__(self) -> str:
        return "remember"


Action = (
    Apply
    | Scale
    | Drain
    | SetServing
    | ReleasePod
    | Delete
    | MarkRevision
    | Hold
    | PutBack
    | Adopt
    | Label
    | EnsureSecret
    | Certify
    | SetDecodeReplicas
    | Tell
    | WriteStatus
    | Remember
)
