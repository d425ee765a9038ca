"""What died or froze: from the pods' own records into a bounded list, each once."""

from __future__ import annotations

from collections.abc import Iterable

from sluice_operator.api.status import MAX_INCIDENTS, MAX_MESSAGE, IncidentStatus
from sluice_operator.decide.moments import rfc3339
from sluice_operator.decide.observed import Pod, Termination

# The supervisor's exit statuses: a process died, work was pending and nothing moved.
REASONS = {1: "Died", 3: "Wedged"}


def seen(pods: Iterable[Pod]) -> tuple[IncidentStatus, ...]:
    """Every end that was no wish of ours: exit status 0 and a pod that is going are none."""
    told = []
    for pod in pods:
        if pod.ended_by_node:
            told.append(_ended(pod))
        elif not pod.terminating:
            told += [_incident(pod, end) for end in pod.terminations if end.exit_code != 0]
    return tuple(told)


def merge(old: Iterable[IncidentStatus], new: Iterable[IncidentStatus]) -> tuple[IncidentStatus, ...]:
    """Newest first, each id once, bounded."""
    by_id = {incident.id: incident for incident in (*old, *new)}
    return tuple(sorted(by_id.values(), key=lambda told: (told.time, told.id), reverse=True)[:MAX_INCIDENTS])


def _ended(pod: Pod) -> IncidentStatus:
    """By its node, for good."""
    reason, _, words = pod.ended_by_node.partition(": ")
    at = max(pod.created_at, pod.ready_changed_at, *(end.at for end in pod.terminations))
    message = (words.strip() or reason).splitlines()[0][:MAX_MESSAGE]
    return IncidentStatus(f"{pod.name}.ended"[:128], rfc3339(at), pod.name, pod.role.value, reason[:64], message)


def _incident(pod: Pod, end: Termination) -> IncidentStatus:
    reason = "OOMKilled" if end.reason == "OOMKilled" else REASONS.get(end.exit_code, "Died")
    lines = end.message.strip().splitlines() or [f"exit {end.exit_code} {end.reason}".strip()]
    message = lines[0]
    return IncidentStatus(
        f"{pod.name}.{end.restart}"[:128], rfc3339(end.at), pod.name, pod.role.value, reason, message[:MAX_MESSAGE]
    )
