"""The fault points of an engine's processes, by the process that reaches them."""

from __future__ import annotations

ENGINE_POINTS = {
    "leader.turn": "a callback of the leader's loop outside the plan",
    "leader.plan": "inside `plan`",
    "leader.admit": "sequences that wait are about to be given their records (may be held back)",
    "leader.schedule": "a running sequence is about to get its share of a step (one may be held back)",
    "leader.kick": "another turn of the step loop is wanted (may be held back)",
    "leader.publish": "a step's tokens are about to go out",
    "leader.frame": "the encoded step record (may be changed; nothing is sent where nothing is left of it)",
    "lease.turn": "a turn of the lease thread's loop",
    "lease.message": "a message on a lease's stream, before it is understood",
    "lease.event": "a lease is about to act on an event (may stay there while its loop goes on)",
    "rank.load": "before the model is built",
    "rank.progress": "some more of the weights has been read (a real model's only)",
    "rank.receive": "a step record has come",
    "rank.device": "the model is about to run",
    "rank.report": "a result is about to go out",
    "sidecar.socket": "a turn of the sidecar's socket loop",
    "sidecar.poll": "a turn of the transfer poller",
    "sidecar.complete": "a READ has completed (may be held back)",
    "sidecar.verify": "a record is about to be verified",
}
