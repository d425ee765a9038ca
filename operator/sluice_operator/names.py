"""Names and labels of everything that belongs to a ModelDeployment: functions of its name, a role and a revision."""

from __future__ import annotations

import re
from enum import StrEnum

PREFIX = "sluice.dev"
LABEL_DEPLOYMENT = f"{PREFIX}/deployment"
LABEL_ROLE = f"{PREFIX}/role"
LABEL_REVISION = f"{PREFIX}/revision"
# On a pod that was released from its ReplicaSet for somebody to look at.
LABEL_QUARANTINED = f"{PREFIX}/quarantined"
# On a ControllerRevision: what became of it, and why. Labels, for annotations get lost.
LABEL_VERDICT = f"{PREFIX}/verdict"
LABEL_VERDICT_REASON = f"{PREFIX}/verdict-reason"
# Beside them, for people: which pod failed, and its last words. Nothing is decided by it.
ANNOTATION_VERDICT_DETAIL = f"{PREFIX}/verdict-detail"
# Which labels and annotations of an object come from spec.metadata.
ANNOTATION_EXTRA = f"{PREFIX}/metadata"
READINESS_GATE = f"{PREFIX}/serving"
MANAGED_BY = "sluice-operator"
# As which we own fields of objects.
FIELD_MANAGER = MANAGED_BY
OPERATOR_LABELS = {"app.kubernetes.io/name": "sluice-operator"}
MAIN_CONTAINER = "main"


class PodRole(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    GATEWAY = "gateway"


ENGINE_ROLES = (PodRole.PREFILL, PodRole.DECODE)


class Verdict(StrEnum):
    """Of a revision: it served completely once, or a rollout to it was taken back."""

    UNKNOWN = ""
    GOOD = "good"
    FAILED = "failed"


def engine_name(name: str, role: PodRole, revision: str) -> str:
    """Of a Deployment and of its ConfigMap."""
    return f"{name}-{role}-{revision}"


def role_name(name: str, role: PodRole) -> str:
    """Of Service, PodDisruptionBudget, NetworkPolicy and, for the gateway, of everything."""
    return f"{name}-{role}"


def revision_name(name: str, revision: str) -> str:
    return f"{name}-{revision}"


def account_name(name: str, role: PodRole) -> str:
    return role_name(name, role) if role is PodRole.GATEWAY else f"{name}-engine"


def key_secret(name: str) -> str:
    """What engines and gateways of one deployment share, in key `key`."""
    return f"{name}-key"


def certificate_secret(name: str, role: PodRole) -> str:
    """`tls.crt`, `tls.key`, `ca.crt` of one role's pods."""
    return f"{name}-{role}-tls"


def authority_secret(name: str) -> str:
    """The CA of one deployment, with its key."""
    return f"{name}-ca"


def secrets(name: str) -> tuple[str, ...]:
    """All of a deployment."""
    return (key_secret(name), authority_secret(name), *(certificate_secret(name, role) for role in PodRole))


def claim_name(name: str, role: PodRole, revision: str) -> str:
    return engine_name(name, role, revision)


def base_labels(name: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "sluice",
        "app.kubernetes.io/instance": name,
        "app.kubernetes.io/managed-by": MANAGED_BY,
        LABEL_DEPLOYMENT: name,
    }


def is_ours(key: str) -> bool:
    """Of a label or annotation: nobody else may set it on our objects."""
    return key.startswith(f"{PREFIX}/") or key in base_labels("")


def role_labels(name: str, role: PodRole) -> dict[str, str]:
    """Of every object of that role."""
    return base_labels(name) | {LABEL_ROLE: role.value}


def selector(name: str, role: PodRole, revision: str = "") -> dict[str, str]:
    """Matches the pods of a role, or of one revision of it. Selectors cannot change: keep them few."""
    told = {LABEL_DEPLOYMENT: name, LABEL_ROLE: role.value}
    return told | ({LABEL_REVISION: revision} if revision else {})


def selector_text(labels: dict[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


_DNS_PART = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_DNS_NAME = re.compile(rf"{_DNS_PART}(\.{_DNS_PART})*")
_KEY_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


def is_object_name(text: str) -> bool:
    """A DNS-1123 subdomain, as the API server has it."""
    return len(text) <= 253 and _DNS_NAME.fullmatch(text) is not None


def is_qualified_name(text: str) -> bool:
    """What may be the key of a label or annotation."""
    domain, slash, name = text.rpartition("/")
    return _KEY_NAME.fullmatch(name) is not None and (not slash or is_object_name(domain))


def is_label_value(text: str) -> bool:
    return not text or _KEY_NAME.fullmatch(text) is not None
