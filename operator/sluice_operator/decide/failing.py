"""Why a pod does not come up, in our words, and when that is enough to take a rollout back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sluice_operator.decide.observed import Pod, Termination
from sluice_operator.decide.reasons import Reason, sentence

# A rollout is taken back for what lasts: so many restarts, or so long an image cannot be had. While kubelet pulls a
# large image again after one error, it goes on saying that error.
FAILED_RESTARTS = 3
FAILED_WAIT_S = 300.0
# Whoever ran for so long is in no crash loop; kubelet forgets its back-off then too.
CALM_LIFE_S = 600.0
# What nodes have ended counts against a revision for so long.
ENDED_LATE_S = 600.0
# Beyond the startup budget, for the kubelet to act on it first.
STARTUP_SLACK_S = 60.0

_IMAGE = frozenset({"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull"})
_CONFIG = frozenset({"CreateContainerConfigError", "CreateContainerError"})
_REFUSED = frozenset({Reason.IMAGE_PULL_FAILED, Reason.CONTAINER_CONFIG_ERROR})


def why_not_ready(pod: Pod, now: float, startup_max_s: float) -> tuple[Reason, str]:
    """(reason, detail that names the pod) of a pod that is not ready."""
    name = f"Pod {pod.name}"
    if pod.init_container or pod.sidecar:
        name += f", init container {pod.init_container}" if pod.init_container else f", container {pod.sidecar}"
    if not pod.node:
        words = pod.unschedulable or "not scheduled yet"
        return (Reason.UNSCHEDULABLE if pod.unschedulable else Reason.STARTING), sentence(f"{name}: {words}")
    if pod.waiting_reason in _IMAGE:
        return Reason.IMAGE_PULL_FAILED, f"{name}: {_waits(pod)}"
    if pod.waiting_reason in _CONFIG:
        return Reason.CONTAINER_CONFIG_ERROR, f"{name}: {_waits(pod)}"
    limit_s = startup_max_s + STARTUP_SLACK_S
    if _is_in_crash_loop(pod, limit_s):
        return Reason.CRASH_LOOP, sentence(f"{name} restarted {pod.restarts} times: {_last_words(pod)}")
    if not pod.started:
        # A download takes what it takes: the startup probe has not begun, and nothing of ours bounds it.
        if pod.init_container and pod.runs:
            return Reason.STARTING, f"{name}, has run for {now - pod.starting_at:.0f} s."
        had_s = now - _starting_since(pod, now, limit_s)
        reason = Reason.STARTUP_TIMED_OUT if had_s > limit_s else Reason.STARTING
        waits = f": it waits ({pod.waiting_reason})" if pod.waiting_reason else ""
        return reason, f"{name}, has had {had_s:.0f} s to start{waits}."
    return Reason.NOT_READY, sentence(f"{name} is not ready{_last_words_if_any(pod)}")


def _waits(pod: Pod) -> str:
    """Kubelet's reason and words; its words often begin with the reason, or are missing."""
    words = pod.waiting_message.strip().removeprefix(f"{pod.waiting_reason}:").strip()
    return sentence(": ".join(filter(None, (pod.waiting_reason, words))))


def ended_by_nodes(pods: Iterable[Pod], now: float) -> tuple[Pod, ...]:
    """Those of late that nodes have ended before they were ever ready, the newest first: nobody clears them away. Who
    has served is another matter: that node is short of something."""
    late = [pod for pod in pods if pod.ended_by_node and now - pod.created_at <= ENDED_LATE_S]
    never = [pod for pod in late if not _has_been_ready(pod)]
    return tuple(sorted(never, key=lambda pod: (pod.created_at, pod.name), reverse=True))


def describe_ended(ended: Sequence[Pod]) -> str:
    """One of them, and how many there are."""
    others = f" (and {len(ended) - 1} more)" if len(ended) > 1 else ""
    return f"Pod {ended[0].name}: {ended[0].ended_by_node.rstrip('.')}{others}."


def is_refused(pod: Pod) -> bool:
    """Its image or its configuration cannot be had."""
    return not pod.ready and pod.waiting_reason in _IMAGE | _CONFIG


def failing_since(pods: Iterable[Pod], before: Mapping[str, float], now: float) -> Mapping[str, float]:
    """When each of those that are refused was first seen so, by uid: kubelet does not say."""
    return {pod.uid: before.get(pod.uid, now) for pod in pods if is_refused(pod)}


def has_failed(pod: Pod, now: float, startup_max_s: float, refused_since: float) -> bool:
    """Of a new revision: it will not come up by waiting. A pod that finds no node is no fault of its revision.
    `refused_since`: see `failing_since`."""
    if pod.ready or not pod.node or (pod.started and not pod.sidecar):
        return False
    reason, _ = why_not_ready(pod, now, startup_max_s)
    # What comes before the engine's own start this revision has had once.
    if (pod.init_container or reason in _REFUSED) and _has_been_ready(pod):
        return False
    if reason is Reason.CRASH_LOOP:
        return pod.restarts >= FAILED_RESTARTS
    if reason in _REFUSED:
        return now - refused_since > FAILED_WAIT_S
    return reason is Reason.STARTUP_TIMED_OUT


def _starting_since(pod: Pod, now: float, limit_s: float) -> float:
    """What never was ready is held to its first life; of what has served, only this life counts. Kubelet ends a life
    that does not start in time: a pod that is older than all its lives would be by that has served as well. An init
    container is held to its own turn, for those before it took what they took."""
    first = max(pod.initialized_at, pod.scheduled_at)
    is_older = now - first > (pod.restarts + 1) * limit_s
    has_served = pod.restarts > 0 and (_has_been_ready(pod) or is_older)
    return max(first, pod.starting_at) if pod.init_container or has_served else first


def _has_been_ready(pod: Pod) -> bool:
    """Kubelet writes Ready as it first sees the pod, and Initialized with it or later: a later change of Ready means
    that it was True once. After its node has started anew a pod is initialized again, which is later still."""
    first_seen = pod.scheduled_at + STARTUP_SLACK_S
    if not pod.init_container:
        first_seen = min(first_seen, max(pod.initialized_at, pod.scheduled_at))
    return pod.ready_changed_at > first_seen


def _is_in_crash_loop(pod: Pod, limit_s: float) -> bool:
    """Of an engine or a sidecar, not one whose last life was too long for a start that failed. An init container that
    began anew with its node had ended well."""
    if pod.waiting_reason == "CrashLoopBackOff":
        loops = True
    elif pod.init_container or pod.sidecar:
        loops = pod.restarts >= FAILED_RESTARTS and any(told.exit_code for told in pod.helper_terminations)
    else:
        loops = pod.restarts >= FAILED_RESTARTS and not pod.started
    is_short = pod.last_life_s is None or pod.last_life_s < max(CALM_LIFE_S, limit_s)
    return loops and (is_short or bool(pod.init_container))


def _last_words(pod: Pod) -> str:
    ends = _ends(pod)
    if not ends:
        return pod.waiting_message or "no last words"
    last = max(ends, key=lambda told: told.restart)
    return f"exit {last.exit_code}, {last.message or last.reason or 'no last words'}"


def _last_words_if_any(pod: Pod) -> str:
    return f": {_last_words(pod)}" if _ends(pod) else ""


def _ends(pod: Pod) -> Sequence[Termination]:
    """Of the container that the pod waits for."""
    return pod.helper_terminations if pod.init_container or pod.sidecar else pod.terminations
