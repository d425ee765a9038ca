"""The handoff protocol as a table: (side, state, event) -> (state, effects). No I/O, no clock.

One `Handoff` is one end of one lease, from its Open until its records belong to one side again. The driver turns
messages, ends of streams, timers and what the transport reports into events, and carries out the effects in order. The
table is the whole behaviour: the driver keeps no state of its own that decides what an event means.

An absent entry is a protocol error: it ends that stream and nothing else. Once the stream has ended, events that the
table does not list change nothing, because messages that were under way may still arrive.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class HandoffSide(StrEnum):
    READER = "reader"
    SOURCE = "source"


class HandoffState(StrEnum):
    NEW = "new"  # nothing happened yet
    OPENED = "opened"  # Open sent / received, no answer yet
    GRANTING = "granting"  # admitted; records are granted while chunks finish
    COMPLETE = "complete"  # everything is granted; the reader still pulls
    RELEASING = "releasing"  # reader only: Pulled sent, waiting for Released
    SETTLING = "settling"  # reader only: the stream is over, and READs that were posted may still land
    COMMITTED = "committed"  # reader: the records are its own; source: Released sent
    ENDED = "ended"  # without a commit; nothing is held any more


TERMINAL = frozenset({HandoffState.COMMITTED, HandoffState.ENDED})
_STREAM_IS_OVER = TERMINAL | {HandoffState.SETTLING}


class HandoffEvent(StrEnum):
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
    # what the driver finds
    BAD_WORD = "(a message that does not fit this request)"
    PULLS_DONE = "(all that was granted is here and verified, after Complete)"
    PULL_FAILED = "(a pull failed, or a record of this request is bad)"
    PULLS_TERMINAL = "(no READ can land any more)"
    CANCEL = "(cancelled here)"
    SILENT = "(the source has said nothing for too long)"
    TTL = "(the lease's time is over)"
    STALLED = "(complete, and not pulled within its budget)"
    # the stream
    STREAM_ENDED = "(stream ended)"


class HandoffEffect(StrEnum):
    # reader
    SEND_OPEN = "send Open"
    AUTHORISE_PULL = "authorise the pull"
    FEED_BYTES = "feed the bytes to the transfer"
    PUBLISH_TOKEN = "publish the first token"
    SEND_PULLED = "send Pulled"
    COMMIT = "commit the records"
    SEND_LAST_WORD = "send Mismatch or Progress, and half-close"
    FAIL_REQUEST = "end the request with the reason"
    FINISH_REQUEST = "end the request: it has all its tokens"
    STOP_PULLING = "post no further READ"
    FREE_RECORDS = "free the records that were reserved"
    # source
    DECIDE = "ask admission"
    SEND_ADMITTED = "send Admitted"
    SEND_REFUSED = "send Refused"
    SEND_GRANTED = "send Granted"
    SEND_FIRST_TOKEN = "send FirstToken"
    SEND_COMPLETE = "send Complete"
    SEND_BYTES = "send Bytes"
    SEND_RELEASED = "send Released"
    SUSPECT = "verify these records before they are granted again"
    NOTE_PROGRESS = "log how much had arrived"
    NOTE_STALL = "name the reader that kept the records"
    RELEASE_RECORDS = "give up the lease's hold on its records"
    REJECT_STREAM = "end the stream with UNIMPLEMENTED"
    EXPIRE_STREAM = "end the stream with DEADLINE_EXCEEDED"
    # both
    COUNT_UNKNOWN = "count it"
    END_STREAM = "end the stream"


R, S, St, Ev, Ef = HandoffSide.READER, HandoffSide.SOURCE, HandoffState, HandoffEvent, HandoffEffect

Key = tuple[HandoffSide, HandoffState, HandoffEvent]
Transition = tuple[HandoffState, tuple[HandoffEffect, ...]]


def _reader() -> dict[Key, Transition]:
    """The reader owns the destination: it opens, pulls and commits."""
    table: dict[Key, Transition] = {
        (R, St.NEW, Ev.OPEN): (St.OPENED, (Ef.SEND_OPEN,)),
        (R, St.NEW, Ev.CANCEL): (St.ENDED, (Ef.FREE_RECORDS,)),
        (R, St.OPENED, Ev.ADMITTED): (St.GRANTING, ()),
        (R, St.GRANTING, Ev.GRANTED): (St.GRANTING, (Ef.AUTHORISE_PULL,)),
        (R, St.GRANTING, Ev.BYTES): (St.GRANTING, (Ef.FEED_BYTES,)),
        (R, St.GRANTING, Ev.FIRST_TOKEN): (St.GRANTING, (Ef.PUBLISH_TOKEN,)),
        (R, St.GRANTING, Ev.FIRST_TOKEN_ENDS): (
            St.SETTLING,
            (Ef.PUBLISH_TOKEN, Ef.FINISH_REQUEST, Ef.END_STREAM, Ef.STOP_PULLING),
        ),
        (R, St.GRANTING, Ev.COMPLETE): (St.COMPLETE, ()),
        (R, St.COMPLETE, Ev.BYTES): (St.COMPLETE, (Ef.FEED_BYTES,)),
        (R, St.COMPLETE, Ev.PULLS_DONE): (St.RELEASING, (Ef.SEND_PULLED,)),
        (R, St.RELEASING, Ev.RELEASED): (St.COMMITTED, (Ef.COMMIT, Ef.END_STREAM)),
        (R, St.SETTLING, Ev.PULLS_TERMINAL): (St.ENDED, (Ef.FREE_RECORDS,)),
    }
    for state in (St.GRANTING, St.COMPLETE):
        # The reader's last words: its pull has failed, and this is all that the source can learn of it.
        table[R, state, Ev.PULL_FAILED] = (
            St.SETTLING,
            (Ef.FAIL_REQUEST, Ef.SEND_LAST_WORD, Ef.END_STREAM, Ef.STOP_PULLING),
        )
    for state in (St.OPENED, St.GRANTING, St.COMPLETE, St.RELEASING):
        table[R, state, Ev.CANCEL] = (St.SETTLING, (Ef.END_STREAM, Ef.STOP_PULLING))
        # A prefill that fails says why, and so does a source whose time to drain is over; other ends speak for
        # themselves.
        for event in (Ev.REFUSED, Ev.BAD_WORD, Ev.SILENT, Ev.UNKNOWN, Ev.STREAM_ENDED, Ev.PULL_FAILED):
            counted = (Ef.COUNT_UNKNOWN,) if event is Ev.UNKNOWN else ()
            effects = (*counted, Ef.FAIL_REQUEST, Ef.END_STREAM, Ef.STOP_PULLING)
            table.setdefault((R, state, event), (St.SETTLING, effects))
    return table


def _source() -> dict[Key, Transition]:
    """The source owns the records: it admits, grants and releases."""
    ends, release = (Ef.END_STREAM,), (Ef.RELEASE_RECORDS,)
    table: dict[Key, Transition] = {
        (S, St.NEW, Ev.OPEN): (St.OPENED, (Ef.DECIDE,)),
        (S, St.OPENED, Ev.ADMITTED): (St.GRANTING, (Ef.SEND_ADMITTED,)),
        (S, St.OPENED, Ev.REFUSED): (St.ENDED, (Ef.SEND_REFUSED, *ends)),
        (S, St.GRANTING, Ev.GRANTED): (St.GRANTING, (Ef.SEND_GRANTED,)),
        (S, St.GRANTING, Ev.FIRST_TOKEN): (St.GRANTING, (Ef.SEND_FIRST_TOKEN,)),
        (S, St.GRANTING, Ev.FIRST_TOKEN_ENDS): (St.ENDED, (Ef.SEND_FIRST_TOKEN, *ends, *release)),
        (S, St.GRANTING, Ev.COMPLETE): (St.COMPLETE, (Ef.SEND_COMPLETE,)),
        (S, St.COMPLETE, Ev.PULLED): (St.COMMITTED, (Ef.SEND_RELEASED, *ends, *release)),
        (S, St.COMPLETE, Ev.STALLED): (St.ENDED, (Ef.NOTE_STALL, Ef.EXPIRE_STREAM, *release)),
        (S, St.NEW, Ev.UNKNOWN): (St.ENDED, (Ef.COUNT_UNKNOWN, Ef.REJECT_STREAM)),
        (S, St.NEW, Ev.STREAM_ENDED): (St.ENDED, ()),
        (S, St.NEW, Ev.CANCEL): (St.ENDED, ends),
    }
    for state in (St.GRANTING, St.COMPLETE):
        table |= {
            (S, state, Ev.FETCH): (state, (Ef.SEND_BYTES,)),
            (S, state, Ev.REFUSED): (St.ENDED, (Ef.SEND_REFUSED, *ends, *release)),
            (S, state, Ev.MISMATCH): (St.ENDED, (Ef.SUSPECT, *ends, *release)),
            (S, state, Ev.PROGRESS): (St.ENDED, (Ef.NOTE_PROGRESS, *ends, *release)),
            (S, state, Ev.UNKNOWN): (St.ENDED, (Ef.COUNT_UNKNOWN, Ef.REJECT_STREAM, *release)),
            (S, state, Ev.TTL): (St.ENDED, (Ef.EXPIRE_STREAM, *release)),
            (S, state, Ev.STREAM_ENDED): (St.ENDED, release),
            (S, state, Ev.CANCEL): (St.ENDED, (*ends, *release)),
        }
    return table


TABLE = {**_reader(), **_source()}


class HandoffProtocolError(Exception):
    """The peer or the driver did something that the table does not know. Ends the stream, nothing else."""

    def __init__(self, side: HandoffSide, state: HandoffState, event: HandoffEvent) -> None:
        super().__init__(f"handoff {side.value} in state {state.value} knows no event {event.value}")
        self.side, self.state, self.event = side, state, event


@dataclass(slots=True)
class Handoff:
    """One end of one handoff."""

    side: HandoffSide
    state: HandoffState = HandoffState.NEW

    def expects(self, event: HandoffEvent) -> bool:
        """Whether the table has an entry for it."""
        return (self.side, self.state, event) in TABLE

    def on(self, event: HandoffEvent) -> tuple[HandoffEffect, ...]:
        """Move and return the effects to carry out, in order.

        Raises `HandoffProtocolError` for an absent entry, without moving: the driver answers with `UNKNOWN`.
        """
        entry = TABLE.get((self.side, self.state, event))
        if entry is None:
            if self.state in _STREAM_IS_OVER:
                return ()
            raise HandoffProtocolError(self.side, self.state, event)
        self.state, effects = entry
        return effects

    @property
    def ended(self) -> bool:
        """Nothing is held on this side any more."""
        return self.state in TERMINAL

    @property
    def is_stream_over(self) -> bool:
        return self.state in _STREAM_IS_OVER


def render_markdown() -> str:
    """`docs/protocol.md`."""
    lines = [
        "# The handoff protocol",
        "",
        "Generated from `protocol/sluice_protocol/handoff.py` by `make proto`. The table is the behaviour: the event",
        "loop of the leader owns one state machine per end, the lease thread moves messages, and the sidecar pulls.",
        "",
        "An absent entry ends that stream and nothing else. After the stream has ended, events without an entry change",
        "nothing.",
    ]
    for side in HandoffSide:
        entries = [(state, event, *entry) for (of, state, event), entry in TABLE.items() if of is side]
        lines += ["", f"## {side.value}", "", *_diagram(entries), "", "| state | event | next | effects |"]
        lines.append("| --- | --- | --- | --- |")
        for state, event, after, effects in entries:
            told = "; ".join(effect.value for effect in effects) or "-"
            lines.append(f"| {state.value} | {event.value} | {after.value} | {told} |")
    return "\n".join(lines) + "\n"


def _diagram(
    entries: list[tuple[HandoffState, HandoffEvent, HandoffState, tuple[HandoffEffect, ...]]],
) -> list[str]:
    """A Mermaid state diagram; events that lead from one state to the same other share an arrow."""
    arrows: dict[tuple[HandoffState, HandoffState], list[str]] = {}
    for state, event, after, _ in entries:
        arrows.setdefault((state, after), []).append(event.value.replace("(", " ").replace(")", "").strip())
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {HandoffState.NEW.value}"]
    for (state, after), events in arrows.items():
        lines.append(f"    {state.value} --> {after.value}: {', '.join(events)}")
    reached = {after for _, after in arrows}
    lines += [f"    {state.value} --> [*]" for state in HandoffState if state in TERMINAL & reached]
    return [*lines, "```"]
