"""The lease table: two ends joined in memory under drop, delay, duplicate, cancel and restart."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_protocol.lease import (
    TABLE,
    TERMINAL,
    Lease,
    LeaseEffect,
    LeaseEvent,
    LeaseProtocolError,
    LeaseRole,
    LeaseState,
    render_markdown,
)

SENDS = {
    LeaseEffect.SEND_OPEN: LeaseEvent.OPEN,
    LeaseEffect.SEND_ADMITTED: LeaseEvent.ADMITTED,
    LeaseEffect.SEND_REFUSED: LeaseEvent.REFUSED,
    LeaseEffect.SEND_GRANTED: LeaseEvent.GRANTED,
    LeaseEffect.SEND_COMPLETE: LeaseEvent.COMPLETE,
    LeaseEffect.SEND_PULLED: LeaseEvent.PULLED,
    LeaseEffect.SEND_RELEASED: LeaseEvent.RELEASED,
    LeaseEffect.SEND_BYTES: LeaseEvent.BYTES,
}


@dataclass
class Pair:
    """A reader and a source, their two message queues, and what each end believes about the records.

    `ends`: the first token ends the request. `held`: the source still holds what it granted.
    """

    chunks: int
    ends: bool
    reader: Lease = field(default_factory=lambda: Lease(LeaseRole.READER))
    source: Lease = field(default_factory=lambda: Lease(LeaseRole.SOURCE))
    to_source: deque[LeaseEvent] = field(default_factory=deque)
    to_reader: deque[LeaseEvent] = field(default_factory=deque)
    script: deque[LeaseEvent] = field(default_factory=deque)
    granted: int = 0
    pulled: int = 0
    held: bool = False
    lease_ended: int = 0
    failed: int = 0
    committed: int = 0
    committed_while_held: bool = True
    released_at_source: bool = False
    reads_after_end: int = 0
    tokens: int = 0
    unknown: int = 0

    def __post_init__(self) -> None:
        first = LeaseEvent.FIRST_TOKEN_ENDS if self.ends else LeaseEvent.FIRST_TOKEN
        rest = [] if self.ends else [LeaseEvent.GRANTED, LeaseEvent.COMPLETE]
        self.script.extend([*[LeaseEvent.GRANTED] * self.chunks, first, *rest])

    def start(self) -> None:
        self.on_reader(LeaseEvent.OPEN)

    def on_reader(self, event: LeaseEvent) -> None:
        try:
            effects = self.reader.on(event)
        except LeaseProtocolError:
            if self.reader.ended:
                return
            self.unknown += 1
            effects = self.reader.on(LeaseEvent.UNKNOWN)
        for effect in effects:
            if effect in SENDS:
                self.to_source.append(SENDS[effect])
            elif effect is LeaseEffect.AUTHORISE_PULL:
                self.granted += 1
                self.reads_after_end += self.reader.state in TERMINAL
            elif effect is LeaseEffect.FAIL_ROOM:
                self.failed += 1
            elif effect is LeaseEffect.COMMIT:
                self.committed += 1
                self.committed_while_held = self.released_at_source
            elif effect is LeaseEffect.PUBLISH_TOKEN:
                self.tokens += 1
            elif effect is LeaseEffect.END_STREAM and not self.source.ended:
                self.to_source.append(LeaseEvent.STREAM_ENDED)

    def on_source(self, event: LeaseEvent) -> None:
        try:
            effects = self.source.on(event)
        except LeaseProtocolError:
            if self.source.ended:
                return
            effects = self.source.on(LeaseEvent.UNKNOWN)
        for effect in effects:
            if effect is LeaseEffect.SEND_FIRST_TOKEN:
                self.to_reader.append(event)
            elif effect in SENDS:
                if effect is LeaseEffect.SEND_RELEASED:
                    self.released_at_source = True
                self.to_reader.append(SENDS[effect])
            elif effect is LeaseEffect.DECIDE:
                self.held = True
                self.script.appendleft(LeaseEvent.ADMITTED)
            elif effect is LeaseEffect.LEASE_ENDED:
                self.lease_ended += 1
                self.held = False
            elif effect is LeaseEffect.END_STREAM and not self.reader.ended:
                self.to_reader.append(LeaseEvent.STREAM_ENDED)

    def step(self, choice: int) -> bool:
        """Do one of the things that could happen next; False when nothing could."""
        moves = []
        if self.to_source:
            moves.append(lambda: self.on_source(self.to_source.popleft()))
        if self.to_reader:
            moves.append(lambda: self.on_reader(self.to_reader.popleft()))
        if self.source.state in (LeaseState.OPENED, LeaseState.GRANTING) and self.script:
            moves.append(lambda: self.on_source(self.script.popleft()))
        if self.reader.state is LeaseState.COMPLETE:
            moves.append(lambda: self.on_reader(LeaseEvent.PULLS_DONE))
        if not moves:
            return False
        moves[choice % len(moves)]()
        return True

    def drop_stream(self) -> None:
        """The connection broke: what was under way is lost, both ends hear of it."""
        self.to_source.clear()
        self.to_reader.clear()
        for end, hear in ((self.reader, self.on_reader), (self.source, self.on_source)):
            if not end.ended:
                hear(LeaseEvent.STREAM_ENDED)

    def finish(self, choices: list[int]) -> None:
        for i in range(1000):
            if not self.step(choices[i % len(choices)] if choices else 0):
                break
        for end, hear in ((self.reader, self.on_reader), (self.source, self.on_source)):
            if not end.ended:
                hear(LeaseEvent.TTL)
        while self.step(0):
            pass


choices = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@given(chunks=st.integers(0, 5), ends=st.booleans(), order=choices)
def test_undisturbed_a_room_commits_once_or_ends_with_its_first_token(chunks, ends, order):
    pair = Pair(chunks, ends)
    pair.start()
    pair.finish(order)
    assert pair.tokens == 1
    assert pair.lease_ended == 1
    assert pair.failed == 0
    expected = LeaseState.FINISHED if ends else LeaseState.COMMITTED
    assert (pair.reader.state, pair.source.state) == (expected, expected)
    assert pair.committed == (0 if ends else 1)


# Where a source may take its yes back: a drain's time may be over at any moment.
HELD = (LeaseState.GRANTING, LeaseState.COMPLETE)
disturbances = st.sampled_from(
    ["drop", "reader-cancel", "source-cancel", "reader-ttl", "source-ttl", "pull-failed", "garbage-to-source",
     "garbage-to-reader", "source-refuses", "duplicate-to-source", "duplicate-to-reader"]
)  # fmt: skip


@given(
    chunks=st.integers(0, 4),
    ends=st.booleans(),
    order=choices,
    when=st.integers(0, 25),
    what=disturbances,
)
@settings(max_examples=400)
def test_any_disturbance_ends_both_halves_alone_and_never_commits_what_is_not_held(chunks, ends, order, when, what):
    pair, refused = Pair(chunks, ends), False
    pair.start()
    for i in range(when):
        pair.step(order[i % len(order)])
    match what:
        case "drop":
            pair.drop_stream()
        case "reader-cancel" | "reader-ttl" | "pull-failed" if not pair.reader.ended:
            event = {"reader-cancel": LeaseEvent.CANCEL, "reader-ttl": LeaseEvent.TTL}.get(what, LeaseEvent.PULL_FAILED)
            pair.on_reader(event)
        case "source-cancel" | "source-ttl" if not pair.source.ended:
            pair.on_source(LeaseEvent.CANCEL if what == "source-cancel" else LeaseEvent.TTL)
        case "source-refuses" if pair.source.state in HELD:
            pair.on_source(LeaseEvent.REFUSED)
            refused = True
        case "garbage-to-source" if not pair.source.ended:
            pair.on_source(LeaseEvent.UNKNOWN)
        case "garbage-to-reader" if not pair.reader.ended:
            pair.on_reader(LeaseEvent.UNKNOWN)
        case "duplicate-to-source" if pair.to_source:
            pair.to_source.appendleft(pair.to_source[0])
        case "duplicate-to-reader" if pair.to_reader:
            pair.to_reader.appendleft(pair.to_reader[0])
    pair.finish(order)
    assert pair.reader.ended
    assert pair.source.ended
    assert pair.lease_ended <= 1
    assert pair.held is False or pair.source.state is LeaseState.NEW
    assert pair.committed + pair.failed <= 1
    assert pair.reads_after_end == 0
    if refused:
        # The reader hears why, wherever it is by then.
        assert (pair.reader.state, pair.committed, pair.unknown) == (LeaseState.FAILED, 0, 0)
    if pair.committed:
        assert pair.committed_while_held


def test_every_live_state_survives_unknown_input_by_ending_its_own_stream():
    for role in LeaseRole:
        reachable = {state for (r, state, _) in TABLE if r is role} - TERMINAL
        for state in reachable:
            lease = Lease(role, state)
            lease.on(LeaseEvent.UNKNOWN)
            assert lease.state is LeaseState.FAILED


def test_an_absent_entry_is_an_error_and_moves_nothing():
    lease = Lease(LeaseRole.SOURCE)
    with pytest.raises(LeaseProtocolError, match="source in state new knows no event Pulled"):
        lease.on(LeaseEvent.PULLED)
    assert lease.state is LeaseState.NEW


def test_the_page_names_every_transition():
    page = render_markdown()
    assert page.count("\n| ") == len(TABLE) + 4
