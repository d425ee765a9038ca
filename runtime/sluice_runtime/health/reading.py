"""Reading a flight recorder: from a live mapping or from a copy, into frozen values. Never fails on what a writer that
died in the middle left behind; fails by name on a file that is no recorder of this version."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from sluice_runtime.health import layout
from sluice_runtime.health.layout import WORD as W
from sluice_runtime.health.layout import Field, Header, Phase, Readiness, State, StepField
from sluice_runtime.health.recorder import RecorderError, mirror_slots, writer_slots
from sluice_runtime.health.watched import Watched

MIRROR_TRIES = 20


class Thread(StrEnum):
    """What the kernel says of a row's thread."""

    UNKNOWN = "unknown"
    ALIVE = "alive"
    STOPPED = "stopped"
    GONE = "gone"


# (pid, tid) -> what the kernel says, and the seconds of CPU that the thread has had so far.
Look = Callable[[int, int], tuple[Thread, float]]


@dataclass(frozen=True, slots=True)
class RowReading:
    """A row at one moment. `ticked_s`, `progressed_s`: in a *before*, the reader's clock when the ticks last moved and
    when the progress last moved or nothing was pending, `cpu_ticked_s` its CPU at its last tick, and the most that its
    work was expected to take since either; see `carry`."""

    name: str
    state: State = State.ABSENT
    pid: int = 0
    tid: int = 0
    ticks: int = 0
    progress: int = 0
    pending: int = 0
    pending_since_ns: int = 0
    step: int = 0
    phase: Phase = Phase.IDLE
    phase_since_ns: int = 0
    expected_ns: int = 0
    deadline: int = 0
    count_a: int = 0
    count_b: int = 0
    doing: str = ""
    ident: int = 0
    thread: Thread = Thread.UNKNOWN
    cpu_s: float = 0.0
    ticked_s: float = 0.0
    progressed_s: float = 0.0
    cpu_ticked_s: float = 0.0
    ticked_expected_ns: int = 0
    progressed_expected_ns: int = 0

    @property
    def life(self) -> tuple[int, int]:
        return self.pid, self.tid


@dataclass(frozen=True, slots=True)
class Exit:
    """A process that has ended, as its parent saw it. `reason` and `detail`: its last words, if it had any.
    What a watch gets to see is `named`."""

    process: str
    status: int | None
    reason: str = ""
    detail: str = ""

    def named(self, known: Container[str], otherwise: str) -> Exit:
        """With one of the `known` reasons. If the process gave another one, it goes into the detail."""
        if self.reason in known:
            return self
        detail = ": ".join(part for part in (self.reason, self.detail) if part)
        return replace(self, reason=otherwise, detail=detail)


@dataclass(frozen=True, slots=True)
class Reading:
    """`at_s`: the reader's own clock, which stands still while the reader does not run. `loaded`: bytes of weights, or
    any other number that grows while a start makes progress."""

    at_s: float
    rows: Mapping[str, RowReading]
    started: bool = True
    loaded: int = 0
    loaded_s: float = 0.0
    exits: tuple[Exit, ...] = ()


@dataclass(frozen=True, slots=True)
class StepReading:
    number: int
    sent_at_ns: int
    done_at_ns: int
    tokens: int
    rows: int
    expected_ns: int
    frame_bytes: int
    chain: int
    frame: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class EventReading:
    writer: str
    number: int
    at_ns: int
    text: str


@dataclass(frozen=True, slots=True)
class Mirror:
    """`value` None: never written, too long for its place, or its writer died in the middle of writing it."""

    at_ns: int
    value: Any


class Copy:
    """One look at a recorder's bytes; `data` may be a live mapping or a saved file."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        """Raises RecorderError."""
        view = memoryview(data).cast("B")
        if len(view) != layout.FILE_BYTES:
            raise RecorderError(f"{len(view)} bytes; a flight recorder has {layout.FILE_BYTES}")
        self._bytes = view
        self._numbers = view.cast("Q")
        told = self._numbers[Header.MAGIC], self._numbers[Header.VERSION]
        if told != (layout.MAGIC, layout.VERSION):
            raise RecorderError(f"magic and version are {told}, not {(layout.MAGIC, layout.VERSION)}")

    @property
    def readiness(self) -> Readiness:
        word: Readiness = _enum(Readiness, self._numbers[Header.READINESS], Readiness.NOT_READY)
        return word

    def rows(self) -> dict[str, RowReading]:
        return {row.name: row for index in range(layout.ROWS) if (row := self._row(index)) is not None}

    def _row(self, index: int) -> RowReading | None:
        at = layout.row_at(index)
        name = _text(self._bytes[at : at + layout.NAME_BYTES])
        if not name:
            return None
        base = (at + layout.NAME_BYTES) // W
        numbers = self._numbers[base : base + layout.FIELDS].tolist()
        doing = (base + layout.FIELDS) * W
        return RowReading(
            name,
            _enum(State, numbers[Field.STATE], State.ABSENT),
            numbers[Field.PID],
            numbers[Field.TID],
            numbers[Field.TICKS],
            numbers[Field.PROGRESS],
            numbers[Field.PENDING],
            numbers[Field.PENDING_SINCE],
            numbers[Field.STEP],
            _enum(Phase, numbers[Field.PHASE], Phase.IDLE),
            numbers[Field.PHASE_SINCE],
            numbers[Field.EXPECTED_NS],
            numbers[Field.DEADLINE],
            numbers[Field.COUNT_A],
            numbers[Field.COUNT_B],
            _text(self._bytes[doing : doing + layout.DOING_BYTES]),
            numbers[Field.IDENT],
        )

    def mirror(self, name: str) -> Mirror:
        """An empty one where the recorder has none of that name."""
        slot = mirror_slots(self._bytes).get(name)
        if slot is None:
            return Mirror(0, None)
        at = layout.mirror_at(slot)
        base, start = at // W, at + layout.MIRROR_HEAD_BYTES
        for _ in range(MIRROR_TRIES):
            before = self._numbers[base]
            length, at_ns = min(self._numbers[base + 1], layout.MIRROR_BYTES), self._numbers[base + 2]
            data = bytes(self._bytes[start : start + length])
            if before and before % 2 == 0 and self._numbers[base] == before:
                try:
                    value = json.loads(data)
                except ValueError:
                    break
                return Mirror(at_ns, None if isinstance(value, dict) and "too_long" in value else value)
        return Mirror(0, None)

    def steps(self) -> list[StepReading]:
        """Ascending numbers; a slot that was being written is left out."""
        found = [step for slot in range(layout.STEPS) if (step := self._step(slot)) is not None]
        return sorted(found, key=lambda step: step.number)

    def _step(self, slot: int) -> StepReading | None:
        at = layout.step_at(slot)
        base, start = at // W, at + layout.STEP_HEAD_BYTES
        numbers = self._numbers[base : base + 8].tolist()
        if numbers[StepField.NUMBER] == 0:
            return None
        kept = min(numbers[StepField.FRAME_BYTES], layout.STEP_FRAME_BYTES)
        frame = bytes(self._bytes[start : start + kept])
        if self._numbers[base] != numbers[StepField.NUMBER]:
            return None
        return StepReading(
            numbers[StepField.NUMBER] - 1,
            numbers[StepField.SENT_AT],
            numbers[StepField.DONE_AT],
            numbers[StepField.TOKENS],
            numbers[StepField.ROWS],
            numbers[StepField.EXPECTED_NS],
            numbers[StepField.FRAME_BYTES],
            numbers[StepField.CHAIN],
            frame,
        )

    def events(self) -> list[EventReading]:
        """Of all writers, in order of time."""
        found = []
        for writer, ring in writer_slots(self._bytes).items():
            for slot in range(layout.EVENTS):
                at = layout.event_at(ring, slot)
                number, at_ns = self._numbers[at // W], self._numbers[at // W + 1]
                if number:
                    text = _text(self._bytes[at + 2 * W : at + layout.EVENT_BYTES])
                    found.append(EventReading(writer, number, at_ns, text))
        return sorted(found, key=lambda event: event.at_ns)


def carry(before: Reading | None, after: Reading, watched: Iterable[Watched]) -> Reading:
    """The *before* for the next verdict: every row as it is in `after`, with the moments when it last moved.

    Progress counts as moving while nothing is pending: what is frozen is a counter with work behind it. What the work
    was expected to take is kept until it has moved: its end is known to others a moment before. A loop that has not
    begun has no turns to miss: a start is judged as a whole.
    """
    rows = {}
    pace = {thread.name: thread.paced_by for thread in watched}
    for name, row in after.rows.items():
        old = before.rows.get(name) if before is not None else None
        same = old is not None and old.life == row.life
        expected = expected_ns(row, after.rows, pace.get(name, ""))
        moved = {
            "ticked_s": after.at_s,
            "cpu_ticked_s": row.cpu_s,
            "ticked_expected_ns": expected,
            "progressed_s": after.at_s,
            "progressed_expected_ns": expected,
        }
        begun = row.phase not in (Phase.STARTING, Phase.LOADING)
        if begun and same and old is not None and old.ticks == row.ticks:
            moved |= {"ticked_s": old.ticked_s, "cpu_ticked_s": old.cpu_ticked_s}
            moved["ticked_expected_ns"] = max(old.ticked_expected_ns, expected)
        if same and old is not None and old.progress == row.progress and old.pending and row.pending:
            moved["progressed_s"] = old.progressed_s
            moved["progressed_expected_ns"] = max(old.progressed_expected_ns, expected)
        rows[name] = replace(row, **moved)  # type: ignore[arg-type]
    stands = before is not None and before.loaded == after.loaded and before.started == after.started
    loaded_s = before.loaded_s if stands and before is not None else after.at_s
    return replace(after, rows=rows, loaded_s=loaded_s)


def expected_ns(row: RowReading, rows: Mapping[str, RowReading], paced_by: str) -> int:
    """The loop that paces a row knows how long the step should take that the row carries out or waits for."""
    pacing = rows.get(paced_by)
    return row.expected_ns if pacing is None else max(row.expected_ns, pacing.expected_ns)


def look_at_threads(
    rows: Mapping[str, RowReading], look: Look, pids: Mapping[str, int] | None = None
) -> dict[str, RowReading]:
    """The same rows with what `look` says of the thread of each running one; of one that has not begun, of its process,
    where `pids` has that."""
    looked = dict(rows)
    for name, row in rows.items():
        if row.state is State.ABSENT and (pid := (pids or {}).get(name.partition(".")[0])):
            looked[name] = replace(row, thread=look(pid, pid)[0])
        elif row.state is State.RUNNING:
            thread, cpu_s = look(row.pid, row.tid)
            looked[name] = replace(row, thread=thread, cpu_s=cpu_s)
    return looked


def _text(data: memoryview) -> str:
    return bytes(data).split(b"\0", 1)[0].decode(errors="replace")


def _enum(kind: Any, value: int, default: Any) -> Any:
    try:
        return kind(value)
    except ValueError:
        return default
