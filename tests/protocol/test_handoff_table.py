"""The handoff table: two ends joined in memory under drop, delay, duplicate, cancel and restart."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_protocol.handoff import (
    TABLE,
    TERMINAL,
    Handoff,
    HandoffEffect,
    HandoffEvent,
    HandoffProtocolError,
    HandoffSide,
    HandoffState,
    render_markdown,
)

SENDS = {
    HandoffEffect.SEND_OPEN: HandoffEvent.OPEN,
    HandoffEffect.SEND_ADMITTED: HandoffEvent.ADMITTED,
    HandoffEffect.SEND_REFUSED: HandoffEvent.REFUSED,
    HandoffEffect.SEND_GRANTED: HandoffEvent.GRANTED,
    HandoffEffect.SEND_COMPLETE: HandoffEvent.COMPLETE,
    HandoffEffect.SEND_PULLED: HandoffEvent.PULLED,
    HandoffEffect.SEND_RELEASED: HandoffEvent.RELEASED,
    HandoffEffect.SEND_BYTES: HandoffEvent.BYTES,
}
ENDS = {HandoffEffect.END_STREAM, HandoffEffect.REJECT_STREAM, HandoffEffect.EXPIRE_STREAM}


@dataclass
class Pair:
    """A reader and a source, their two message queues, and what each end believes about the records.

    `ends`: the first token ends the request. `held`: the source still holds what it granted. `stopping`: the reader's
    transport was told to stop, and has not said yet that no READ can land any more. `freed`: how often the reader's
    records were given back; `freed_early`: while a READ could still land.
    """

    chunks: int
    ends: bool
    reader: Handoff = field(default_factory=lambda: Handoff(HandoffSide.READER))
    source: Handoff = field(default_factory=lambda: Handoff(HandoffSide.SOURCE))
    to_source: deque[HandoffEvent] = field(default_factory=deque)
    to_reader: deque[HandoffEvent] = field(default_factory=deque)
    script: deque[HandoffEvent] = field(default_factory=deque)
    granted: int = 0
    held: bool = False
    lease_ended: int = 0
    failed: int = 0
    finished: int = 0
    committed: int = 0
    committed_while_held: bool = True
    released_at_source: bool = False
    reads_after_end: int = 0
    stopping: bool = False
    freed: int = 0
    freed_early: int = 0
    tokens: int = 0
    unknown: int = 0

    def __post_init__(self) -> None:
        first = HandoffEvent.FIRST_TOKEN_ENDS if self.ends else HandoffEvent.FIRST_TOKEN
        rest = [] if self.ends else [HandoffEvent.GRANTED, HandoffEvent.COMPLETE]
        self.script.extend([*[HandoffEvent.GRANTED] * self.chunks, first, *rest])

    def start(self) -> None:
        self.on_reader(HandoffEvent.OPEN)

    def on_reader(self, event: HandoffEvent) -> None:
        try:
            effects = self.reader.on(event)
        except HandoffProtocolError:
            self.unknown += 1
            effects = self.reader.on(HandoffEvent.UNKNOWN)
        for effect in effects:
            if effect in SENDS:
                self.to_source.append(SENDS[effect])
            elif effect is HandoffEffect.AUTHORISE_PULL:
                self.granted += 1
                self.reads_after_end += self.reader.is_stream_over
            elif effect is HandoffEffect.FAIL_REQUEST:
                self.failed += 1
            elif effect is HandoffEffect.FINISH_REQUEST:
                self.finished += 1
            elif effect is HandoffEffect.COMMIT:
                self.committed += 1
                self.committed_while_held = self.released_at_source
            elif effect is HandoffEffect.PUBLISH_TOKEN:
                self.tokens += 1
            elif effect is HandoffEffect.STOP_PULLING:
                self.stopping = True
            elif effect is HandoffEffect.FREE_RECORDS:
                self.freed += 1
                self.freed_early += self.stopping
            elif effect is HandoffEffect.END_STREAM and not self.source.ended:
                self.to_source.append(HandoffEvent.STREAM_ENDED)

    def on_source(self, event: HandoffEvent) -> None:
        try:
            effects = self.source.on(event)
        except HandoffProtocolError:
            effects = self.source.on(HandoffEvent.UNKNOWN)
        for effect in effects:
            if effect is HandoffEffect.SEND_FIRST_TOKEN:
                self.to_reader.append(event)
            elif effect in SENDS:
                if effect is HandoffEffect.SEND_RELEASED:
                    assert self.held
                    self.released_at_source = True
                self.to_reader.append(SENDS[effect])
            elif effect is HandoffEffect.DECIDE:
                self.held = True
                self.on_source(HandoffEvent.ADMITTED)
            elif effect is HandoffEffect.RELEASE_RECORDS:
                self.lease_ended += 1
                self.held = False
            elif effect in ENDS and not self.reader.is_stream_over:
                self.to_reader.append(HandoffEvent.STREAM_ENDED)

    def step(self, choice: int) -> bool:
        """Do one of the things that could happen next; False when nothing could."""
        moves = []
        if self.to_source:
            moves.append(lambda: self.on_source(self.to_source.popleft()))
        if self.to_reader:
            moves.append(lambda: self.on_reader(self.to_reader.popleft()))
        if self.source.state is HandoffState.GRANTING and self.script:
            moves.append(lambda: self.on_source(self.script.popleft()))
        if self.reader.expects(HandoffEvent.PULLS_DONE):
            moves.append(lambda: self.on_reader(HandoffEvent.PULLS_DONE))
        if self.stopping:
            moves.append(self.no_read_can_land)
        if not moves:
            return False
        moves[choice % len(moves)]()
        return True

    def no_read_can_land(self) -> None:
        self.stopping = False
        self.on_reader(HandoffEvent.PULLS_TERMINAL)

    def drop_stream(self) -> None:
        """The connection broke: what was under way is lost, both ends hear of it."""
        self.to_source.clear()
        self.to_reader.clear()
        self.on_reader(HandoffEvent.STREAM_ENDED)
        self.on_source(HandoffEvent.STREAM_ENDED)

    def finish(self, choices: list[int]) -> None:
        for i in range(1000):
            if not self.step(choices[i % len(choices)] if choices else 0):
                break
        self.on_reader(HandoffEvent.SILENT)
        if self.source.expects(HandoffEvent.TTL):
            self.on_source(HandoffEvent.TTL)
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
    reached = (pair.reader.state, pair.source.state)
    if ends:
        assert reached == (HandoffState.ENDED, HandoffState.ENDED)
        assert (pair.committed, pair.finished, pair.freed) == (0, 1, 1)
    else:
        assert reached == (HandoffState.COMMITTED, HandoffState.COMMITTED)
        assert (pair.committed, pair.finished, pair.freed) == (1, 0, 0)
    assert pair.freed_early == 0


# Where a source may take its yes back: a drain's time may be over at any moment.
HELD = (HandoffState.GRANTING, HandoffState.COMPLETE)
disturbances = st.sampled_from(
    ["drop", "reader-cancel", "source-cancel", "reader-silent", "bad-word", "source-ttl", "pull-failed",
     "garbage-to-source", "garbage-to-reader", "source-refuses", "duplicate-to-source", "duplicate-to-reader"]
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
        case "reader-cancel":
            pair.on_reader(HandoffEvent.CANCEL)
        case "reader-silent":
            pair.on_reader(HandoffEvent.SILENT)
        case "bad-word":
            pair.on_reader(HandoffEvent.BAD_WORD)
        case "pull-failed":
            pair.on_reader(HandoffEvent.PULL_FAILED)
        case "source-cancel" | "source-ttl" | "source-refuses" if pair.source.state in HELD:
            events = {"source-cancel": HandoffEvent.CANCEL, "source-ttl": HandoffEvent.TTL}
            pair.on_source(events.get(what, HandoffEvent.REFUSED))
            refused = what == "source-refuses"
        case "garbage-to-source":
            pair.on_source(HandoffEvent.UNKNOWN)
        case "garbage-to-reader":
            pair.on_reader(HandoffEvent.UNKNOWN)
        case "duplicate-to-source" if pair.to_source:
            pair.to_source.appendleft(pair.to_source[0])
        case "duplicate-to-reader" if pair.to_reader:
            pair.to_reader.appendleft(pair.to_reader[0])
    pair.finish(order)
    assert pair.reader.ended
    assert pair.source.ended or pair.source.state is HandoffState.NEW
    assert pair.lease_ended <= 1
    assert pair.held is False
    assert pair.committed + pair.failed + pair.finished <= 1
    assert pair.committed + pair.freed == 1, "the reader's records have exactly one end"
    assert pair.reads_after_end == pair.freed_early == 0
    if refused:
        # The reader hears why, wherever it is by then.
        assert (pair.committed, pair.unknown) == (0, 0)
    if pair.committed:
        assert pair.committed_while_held


def test_every_live_state_survives_unknown_input_by_ending_its_own_stream():
    for side in HandoffSide:
        reachable = {state for (of, state, _) in TABLE if of is side} - TERMINAL - {HandoffState.SETTLING}
        # Nothing is said to a reader that has not opened its lease, nor to a source that is deciding.
        reachable -= {HandoffState.NEW if side is HandoffSide.READER else HandoffState.OPENED}
        for state in reachable:
            handoff = Handoff(side, state)
            handoff.on(HandoffEvent.UNKNOWN)
            assert handoff.is_stream_over


def test_nothing_but_its_transport_moves_a_reader_whose_stream_is_over():
    for event in HandoffEvent:
        handoff = Handoff(HandoffSide.READER, HandoffState.SETTLING)
        effects = handoff.on(event)
        if event is HandoffEvent.PULLS_TERMINAL:
            assert (handoff.state, effects) == (HandoffState.ENDED, (HandoffEffect.FREE_RECORDS,))
        else:
            assert (handoff.state, effects) == (HandoffState.SETTLING, ())


def test_a_reader_frees_its_records_only_once_no_read_can_land():
    for (side, state, event), (_, effects) in TABLE.items():
        if HandoffEffect.FREE_RECORDS in effects:
            assert event is HandoffEvent.PULLS_TERMINAL or state is HandoffState.NEW
        if side is HandoffSide.READER and HandoffEffect.END_STREAM in effects:
            assert (HandoffEffect.STOP_PULLING in effects) != (HandoffEffect.COMMIT in effects)


def test_an_absent_entry_is_an_error_and_moves_nothing():
    handoff = Handoff(HandoffSide.SOURCE)
    with pytest.raises(HandoffProtocolError, match="source in state new knows no event Pulled"):
        handoff.on(HandoffEvent.PULLED)
    assert handoff.state is HandoffState.NEW


def test_the_page_names_every_transition_and_shows_every_state():
    page = render_markdown()
    assert page.count("\n| ") == len(TABLE) + 4
    assert page.count("```mermaid") == 2
    for _, state, _ in TABLE:
        assert f"    {state.value} --> " in page
