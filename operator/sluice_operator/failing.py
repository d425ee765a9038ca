"""Why a pod does not come up, in our words, and when that is enough to take a rollout back."""

from __future__ import annotations

from sluice_operator.observed import Pod
from sluice_operator.reasons import Reason

# A rollout is taken back for what lasts: so many restarts, or so long an image cannot be had.
FAILED_RESTARTS = 3
FAILED_WAIT_S = 60.0
# Beyond the startup budget, for the kubelet to act on it first.
STARTUP_SLACK_S = 60.0

_IMAGE = frozenset({"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull"})
_CONFIG = frozenset({"CreateContainerConfigError", "CreateContainerError"})


def why_not_ready(pod: Pod, now: float, startup_max_s: float) -> tuple[Reason, str]:
    """(reason, detail that names the pod) of a pod that is not ready."""
    name = f"Pod {pod.name}"
    if not pod.node:
        words = pod.unschedulable or "not scheduled yet"
        return (Reason.UNSCHEDULABLE if pod.unschedulable else Reason.STARTING), f"{name}: {words}."
    if pod.waiting_reason in _IMAGE:
        return Reason.IMAGE_PULL_FAILED, f"{name}: {pod.waiting_reason}: {pod.waiting_message}."
    if pod.waiting_reason in _CONFIG:
        return Reason.CONTAINER_CONFIG_ERROR, f"{name}: {pod.waiting_reason}: {pod.waiting_message}."
    if pod.waiting_reason == "CrashLoopBackOff" or (pod.restarts >= FAILED_RESTARTS and not pod.started):
        return Reason.CRASH_LOOP, f"{name} restarted {pod.restarts} times: {_last_words(pod)}."
    if not pod.started:
        if now - pod.scheduled_at > startup_max_s + STARTUP_SLACK_S:
            return Reason.STARTUP_TIMED_OUT, f"{name} has had {now - pod.scheduled_at:.0f} s to start."
        return Reason.STARTING, f"{name} has had {now - pod.scheduled_at:.0f} s to start."
    return Reason.NOT_READY, f"{name} is not ready{_last_words_if_any(pod)}."


def has_failed(pod: Pod, now: float, startup_max_s: float) -> bool:
    """Of a new revision: it will not come up by waiting. A pod that finds no node is no fault of its revision."""
    if pod.ready or pod.started or not pod.node:
        return False
    reason, _ = why_not_ready(pod, now, startup_max_s)
    if reason is Reason.CRASH_LOOP:
        return pod.restarts >= FAILED_RESTARTS
    if reason in (Reason.IMAGE_PULL_FAILED, Reason.CONTAINER_CONFIG_ERROR):
        return now - pod.scheduled_at > FAILED_WAIT_S
    return reason is Reason.STARTUP_TIMED_OUT


def _last_words(pod: Pod) -> str:
    if not pod.terminations:
        return pod.waiting_message or "no last words"
    last = max(pod.terminations, key=lambda told: told.restart)
    return f"exit {last.exit_code}, {last.message or last.reason or 'no last words'}"


def _last_words_if_any(pod: Pod) -> str:
    return f": {_last_words(pod)}" if pod.terminations else ""
