"""What the sidecar's threads say of themselves in the recorder."""

from __future__ import annotations

from sluice_engine.transfer.pull import Pull, PullState
from sluice_engine.transfer.puller import Puller
from sluice_engine.watched_rows import SIDECAR_POLLER, SIDECAR_SOCKET, SIDECAR_VERIFIER, EngineMirror
from sluice_runtime.health.recorder import Recorder, Row, unrecorded

MIRROR_S = 0.25
# In a mirror of fixed size.
MAX_DESCRIBED = 128
# Each of them is an end of something that was waited for, a good one or a bad one.
_MOVES = ("pieces_posted", "pieces_done", "pieces_failed", "records_verified", "failed", "zombies")


class SidecarMarks:
    """One row per thread. `recorder` None: there is no supervisor."""

    def __init__(self, recorder: Recorder | None) -> None:
        self._recorder = recorder
        self.socket, self.poller, self.verifier = (
            self._row(watched.name) for watched in (SIDECAR_SOCKET, SIDECAR_POLLER, SIDECAR_VERIFIER)
        )
        self._mirrored = 0.0

    def _row(self, name: str) -> Row:
        return unrecorded(name) if self._recorder is None else self._recorder.row(name)

    def polled(self, puller: Puller, now: float) -> None:
        """After each turn of the poller, on its thread. The puller ends a READ that does not end, by a deadline of its
        own: until that has passed nothing counts as pending, or a peer's fault would look like this thread's."""
        row = self.poller
        row.tick()
        row.progress(sum(puller.counters[name] for name in _MOVES))
        row.pending(sum(now >= pull.deadline and _is_waited_for(pull) for pull in puller.pulls))
        if self._recorder is not None and now - self._mirrored >= MIRROR_S:
            self._mirrored = now
            self._recorder.mirror(EngineMirror.TRANSFERS, describe(puller, now))


def describe(puller: Puller, now: float) -> dict[str, object]:
    """Every pull, for the mirror."""
    return {
        "leases": puller.num_leases,
        "in_flight": puller.num_in_flight,
        "stranded": len(puller.stranded),
        "counters": dict(puller.counters),
        "pulls": [
            {
                "lease": pull.lease_id,
                "peer": pull.peer,
                "state": pull.state.value,
                "queued": len(pull.queue),
                "owed_bytes": pull.owed_bytes,
                "unverified": pull.outstanding,
                "done": pull.done_records,
                "bytes": pull.done_bytes,
                "deadline_in_s": round(pull.deadline - now, 3),
            }
            for pull in puller.pulls[:MAX_DESCRIBED]
        ],
    }


def _is_waited_for(pull: Pull) -> bool:
    return pull.state in (PullState.RUN, PullState.SETTLE) and bool(pull.owed_bytes or pull.outstanding)
