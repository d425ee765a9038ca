"""The lease protocol as a table: (role, state, event) -> (state, effects). No I/O, no clock.

Whoever drives a `Lease` turns messages, ends of streams, time-outs and local facts into events, and carries out the
effects in order. An absent entry is a protocol error: it ends that stream and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class LeaseRole(StrEnum):
    READER = "reader"
    SOURCE = "source"


class LeaseState(StrEnum):
    NEW = "new"  # nothing happened yet
    OPENED = "opened"  # Open sent / received, no answer yet
    GRANTING = "granting"  # admitted; records are granted while chunks finish
    COMPLETE = "complete"  # everything is granted; the reader still pulls
    RELEASING = "releasing"  # reader only: Pulled sent, waiting for Released
    COMMITTED = "committed"  # reader: records are its own; source: Released sent
    FINISHED = "finished"  # the first token ended the request: nothing is committed
    FAILED = "failed"  # refused, ended early or broken: the request needs a new room


TERMINAL = frozenset({LeaseState.COMMITTED, LeaseState.FINISHED, LeaseState.FAILED})


class LeaseEvent(StrEnum):
    # messages
    OPEN = "Open"
    ADMITTED = "Admitted"
    REFUSED = "Refused"
    GRANTED = "Granted"
    FIRST_TOKEN = "FirstToken"
    FIRST_TOKEN_ENDS = "FirstToken(ends)"
    COMPLETE = "Complete"
    PULLED = "Pulled"
    FETCH = "Fetch"
    MISMATCH = "Mismatch"
    PROGRESS = "Progress"
    BYTES = "Bytes"
    RELEASED = "Released"
    UNKNOWN = "(unknown or malformed)"
    # local facts
    PULLS_DONE = "(all handles terminal and DONE, after Complete)"
    PULL_FAILED = "(a handle failed, or a check)"
    CANCEL = "(cancelled here)"
    TTL = "(ttl ran out)"
    STALLED = "(complete, and not pulled within its budget)"
    # the stream
    STREAM_ENDED = "(stream ended)"


class LeaseEffect(StrEnum):
    SEND_OPEN = "send Open"
    SEND_ADMITTED = "send Admitted"
    SEND_REFUSED = "send Refused"
    SEND_GRANTED = "send Granted"
    SEND_FIRST_TOKEN = "send FirstToken"
    SEND_COMPLETE = "send Complete"
    SEND_PULLED = "send Pulled"
    SEND_LAST_WORD = "send Mismatch or Progress, and half-close"
    SEND_BYTES = "send Bytes"
    SEND_RELEASED = "send Released"
    DECIDE = "ask admission"
    PUBLISH_TOKEN = "publish the first token"
    AUTHORISE_PULL = "authorise the pull"
    FEED_BYTES = "feed the bytes to the transfer"
    COMMIT = "check generations, then commit"
    FAIL_ROOM = "fail the room; records are free once their handles are terminal"
    STOP_PULLING = "post no further READ; records are free once their handles are terminal"
    COUNT_UNKNOWN = "count it"
    END_STREAM = "end the stream"
    SUSPECT = "verify these records before anybody gets them"
    NOTE_PROGRESS = "note how much had arrived"
    LEASE_ENDED = "tell the scheduler LeaseEnded"


R, S, St, Ev, Ef = LeaseRole.READER, LeaseRole.SOURCE, LeaseState, LeaseEvent, LeaseEffect

Transition = tuple[LeaseState, tuple[LeaseEffect, ...]]


def build_table() -> dict[tuple[LeaseRole, LeaseState, LeaseEvent], Transition]:
    table: dict[tuple[LeaseRole, LeaseState, LeaseEvent], Transition] = {
        # The reader: owns the destination, opens, pulls, commits.
        (R, St.NEW, Ev.OPEN): (St.OPENED, (Ef.SEND_OPEN,)),
        (R, St.OPENED, Ev.ADMITTED): (St.GRANTING, ()),
        (R, St.OPENED, Ev.REFUSED): (St.FAILED, (Ef.FAIL_ROOM, Ef.END_STREAM)),
        (R, St.GRANTING, Ev.GRANTED): (St.GRANTING, (Ef.AUTHORISE_PULL,)),
        (R, St.GRANTING, Ev.BYTES): (St.GRANTING, (Ef.FEED_BYTES,)),
        (R, St.GRANTING, Ev.FIRST_TOKEN): (St.GRANTING, (Ef.PUBLISH_TOKEN,)),
        (R, St.GRANTING, Ev.FIRST_TOKEN_ENDS): (St.FINISHED, (Ef.STOP_PULLING, Ef.PUBLISH_TOKEN, Ef.END_STREAM)),
        (R, St.GRANTING, Ev.COMPLETE): (St.COMPLETE, ()),
        # A prefill that fails says why, and so does a source whose time to drain is over; every other end speaks for
        # itself.
        (R, St.GRANTING, Ev.REFUSED): (St.FAILED, (Ef.FAIL_ROOM, Ef.END_STREAM)),
        (R, St.COMPLETE, Ev.REFUSED): (St.FAILED, (Ef.FAIL_ROOM, Ef.END_STREAM)),
        (R, St.RELEASING, Ev.REFUSED): (St.FAILED, (Ef.FAIL_ROOM, Ef.END_STREAM)),
        (R, St.COMPLETE, Ev.BYTES): (St.COMPLETE, (Ef.FEED_BYTES,)),
        (R, St.COMPLETE, Ev.PULLS_DONE): (St.RELEASING, (Ef.SEND_PULLED,)),
        (R, St.RELEASING, Ev.RELEASED): (St.COMMITTED, (Ef.COMMIT, Ef.END_STREAM)),
        # The source: owns the records, admits, grants, releases.
        (S, St.NEW, Ev.OPEN): (St.OPENED, (Ef.DECIDE,)),
        (S, St.OPENED, Ev.ADMITTED): (St.GRANTING, (Ef.SEND_ADMITTED,)),
        (S, St.OPENED, Ev.REFUSED): (St.FAILED, (Ef.SEND_REFUSED, Ef.END_STREAM)),
        (S, St.GRANTING, Ev.GRANTED): (St.GRANTING, (Ef.SEND_GRANTED,)),
        (S, St.GRANTING, Ev.FETCH): (St.GRANTING, (Ef.SEND_BYTES,)),
        (S, St.GRANTING, Ev.FIRST_TOKEN): (St.GRANTING, (Ef.SEND_FIRST_TOKEN,)),
        (S, St.GRANTING, Ev.FIRST_TOKEN_ENDS): (St.FINISHED, (Ef.SEND_FIRST_TOKEN, Ef.END_STREAM, Ef.LEASE_ENDED)),
        (S, St.GRANTING, Ev.COMPLETE): (St.COMPLETE, (Ef.SEND_COMPLETE,)),
        (S, St.GRANTING, Ev.REFUSED): (St.FAILED, (Ef.SEND_REFUSED, Ef.END_STREAM, Ef.LEASE_ENDED)),
        (S, St.COMPLETE, Ev.REFUSED): (St.FAILED, (Ef.SEND_REFUSED, Ef.END_STREAM, Ef.LEASE_ENDED)),
        (S, St.COMPLETE, Ev.FETCH): (St.COMPLETE, (Ef.SEND_BYTES,)),
        (S, St.COMPLETE, Ev.STALLED): (St.FAILED, (Ef.END_STREAM, Ef.LEASE_ENDED)),
        (S, St.COMPLETE, Ev.PULLED): (St.COMMITTED, (Ef.SEND_RELEASED, Ef.END_STREAM, Ef.LEASE_ENDED)),
    }
    for state in (St.GRANTING, St.COMPLETE):
        # The reader's last words: its pull has failed, and this is all that the source can learn of it.
        table[R, state, Ev.PULL_FAILED] = (St.FAILED, (Ef.FAIL_ROOM, Ef.SEND_LAST_WORD, Ef.END_STREAM))
        table[S, state, Ev.MISMATCH] = (St.FAILED, (Ef.SUSPECT, Ef.END_STREAM, Ef.LEASE_ENDED))
        table[S, state, Ev.PROGRESS] = (St.FAILED, (Ef.NOTE_PROGRESS, Ef.END_STREAM, Ef.LEASE_ENDED))
    for state in LeaseState:
        if state in TERMINAL:
            # What still arrives after the end is nobody's business any more; the stream is gone or going.
            table[R, state, Ev.STREAM_ENDED] = (state, ())
            table[S, state, Ev.STREAM_ENDED] = (state, ())
            continue
        for event in (Ev.STREAM_ENDED, Ev.TTL, Ev.CANCEL, Ev.PULL_FAILED, Ev.UNKNOWN):
            counted = (Ef.COUNT_UNKNOWN,) if event is Ev.UNKNOWN else ()
            ending = () if event is Ev.STREAM_ENDED else (Ef.END_STREAM,)
            table.setdefault((R, state, event), (St.FAILED, (*counted, Ef.FAIL_ROOM, *ending)))
            if state is not St.RELEASING and event is not Ev.PULL_FAILED:
                # Before Open there is nothing to give back.
                ended = () if state is St.NEW else (Ef.LEASE_ENDED,)
                table[S, state, event] = (St.FAILED, (*counted, *ending, *ended))
    return table


TABLE = build_table()


class LeaseProtocolError(Exception):
    """The peer or the driver did something that the table does not know. Ends the stream, nothing else."""

    def __init__(self, role: LeaseRole, state: LeaseState, event: LeaseEvent) -> None:
        super().__init__(f"lease {role.value} in state {state.value} knows no event {event.value}")
        self.role, self.state, self.event = role, state, event


@dataclass(slots=True)
class Lease:
    """One end of one lease."""

    role: LeaseRole
    state: LeaseState = LeaseState.NEW

    def on(self, event: LeaseEvent) -> tuple[LeaseEffect, ...]:
        """Move and return the effects to carry out, in order.

        Raises `LeaseProtocolError` for an absent entry, without moving: the driver answers with `UNKNOWN`.
        """
        entry = TABLE.get((self.role, self.state, event))
        if entry is None:
            raise LeaseProtocolError(self.role, self.state, event)
        self.state, effects = entry
        return effects

    @property
    def ended(self) -> bool:
        return self.state in TERMINAL


def render_markdown() -> str:
    """`docs/protocol.md`."""
    lines = [
        "# The lease protocol",
        "",
        "Generated from `protocol/sluice_protocol/lease.py` by `make proto`.",
        "An absent entry ends that stream, nothing else.",
    ]
    for role in LeaseRole:
        lines += ["", f"## {role.value}", "", "| state | event | next | effects |", "| --- | --- | --- | --- |"]
        for (entry_role, state, event), (after, effects) in TABLE.items():
            if entry_role is role:
                lines.append(
                    f"| {state.value} | {event.value} | {after.value} | {'; '.join(e.value for e in effects) or '-'} |"
                )
    return "\n".join(lines) + "\n"
