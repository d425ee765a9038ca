"""Writing to the flight recorder. Writers only store: no lock, no call that can block, nothing to be in the middle of.

The supervisor creates the file and names what is in it; other processes attach. A row has one writer, its thread.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sluice_runtime.health import layout
from sluice_runtime.health.layout import SUPERVISOR, Field, Header, Phase, Readiness, State, StepField
from sluice_runtime.health.layout import WORD as W

# What a word holds.
MASK = (1 << 64) - 1


class RecorderError(Exception):
    """A file that is no flight recorder of this version, or a row that it does not have."""


class Row:
    """One watched thread's marks. Every method is a handful of stores; call them from that thread."""

    __slots__ = ("_base", "_busy", "_doing", "_numbers", "_phase", "_ticks", "name")

    def __init__(self, numbers: memoryview, doing: memoryview, base: int, name: str) -> None:
        self._numbers, self._doing, self._base = numbers, doing, base
        self._ticks = numbers[base + Field.TICKS]
        self._phase = -1
        self._busy = False
        self.name = name

    def begin(self, phase: Phase = Phase.STARTING) -> None:
        """This thread is the one to watch from now on."""
        put, base = self._numbers, self._base
        put[base + Field.PID] = os.getpid()
        put[base + Field.TID] = threading.get_native_id()
        put[base + Field.IDENT] = threading.get_ident()
        put[base + Field.PENDING] = put[base + Field.PENDING_SINCE] = put[base + Field.DEADLINE] = 0
        self.enter(phase)
        put[base + Field.STATE] = State.RUNNING
        self.tick()

    def tick(self) -> None:
        self._ticks = self._ticks + 1 & MASK  # it began with what the file said
        self._numbers[self._base + Field.TICKS] = self._ticks

    def enter(self, phase: Phase) -> None:
        """Before the work that it names."""
        if phase != self._phase:
            self._phase = phase
            self._numbers[self._base + Field.PHASE_SINCE] = time.monotonic_ns()
            self._numbers[self._base + Field.PHASE] = phase

    def progress(self, value: int) -> None:
        """The counter that must move while something is pending."""
        self._numbers[self._base + Field.PROGRESS] = value

    def pending(self, amount: int) -> None:
        """How much waits for this thread's counter to move. Since when is kept from the first."""
        if bool(amount) != self._busy:
            self._busy = bool(amount)
            self._numbers[self._base + Field.PENDING_SINCE] = time.monotonic_ns() if amount else 0
        self._numbers[self._base + Field.PENDING] = amount

    def step(self, number: int) -> None:
        self._numbers[self._base + Field.STEP] = number

    def expect(self, ns: int) -> None:
        """How long the work in hand should take, as measured so far; 0: unknown."""
        self._numbers[self._base + Field.EXPECTED_NS] = ns

    def count(self, which: Field, value: int) -> None:
        self._numbers[self._base + which] = value

    def doing(self, text: str) -> None:
        """A few words for people, cut at DOING_BYTES."""
        data = text.encode(errors="replace")[: layout.DOING_BYTES]
        self._doing[: len(data)] = data
        self._doing[len(data) :] = bytes(layout.DOING_BYTES - len(data))

    def forget(self) -> None:
        """Called when its process was reaped: there is nothing to watch until the next one begins."""
        self._numbers[self._base + Field.STATE] = State.ABSENT

    def end(self, failed: bool = False) -> None:
        """The loop is over. Its phase stays, and PHASE_SINCE says when it ended: the first end caused the others."""
        self._numbers[self._base + Field.PHASE_SINCE] = time.monotonic_ns()
        self._numbers[self._base + Field.STATE] = State.FAILED if failed else State.ENDED


def unrecorded(name: str) -> Row:
    """A row that is not read: for a process without a supervisor."""
    memory = memoryview(bytearray(layout.FIELDS * W + layout.DOING_BYTES))
    return Row(memory[: layout.FIELDS * W].cast("Q"), memory[layout.FIELDS * W :], 0, name)


def rows_of(path: Path, *names: str) -> tuple[Row, ...]:
    """Rows of the recorder at `path`, or rows that are not read where there is none."""
    if not path.exists():
        return tuple(unrecorded(name) for name in names)
    recorder = Recorder.attach(path)
    return tuple(recorder.row(name) for name in names)


@dataclass(frozen=True, slots=True)
class RecorderNames:
    """What a recorder has: rows, documents that are mirrored in it, and writers of lines beside the supervisor."""

    rows: tuple[str, ...]
    mirrors: tuple[str, ...] = ()
    writers: tuple[str, ...] = ()

    def places(self) -> Iterator[tuple[int, str]]:
        """(where in the file, name) of each. Raises RecorderError for one that does not fit."""
        kinds: tuple[tuple[str, tuple[str, ...], int, Callable[[int], int]], ...] = (
            ("row", self.rows, layout.ROWS, layout.row_at),
            ("mirror", self.mirrors, layout.MIRRORS, lambda slot: layout.mirror_at(slot) + layout.MIRROR_NAME_AT),
            ("writer", (SUPERVISOR, *self.writers), layout.WRITERS, layout.ring_at),
        )
        for kind, names, places, place in kinds:
            if len(names) > places or len(set(names)) != len(names):
                raise RecorderError(f"{len(names)} {kind}s of {places}, each name once")
            for index, name in enumerate(names):
                if not 0 < len(name.encode()) <= layout.NAME_BYTES:
                    raise RecorderError(f"{kind} name {name!r}: 1 to {layout.NAME_BYTES} bytes")
                yield place(index), name


class Recorder:
    """A mapping of the file. Close nothing: the mapping ends with the process."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self.path = path
        # Its creator's.
        self._fd = -1
        self._names: RecorderNames | None = None
        self._bytes = memoryview(mapped)
        self._numbers = self._bytes.cast("Q")
        self._mirrors: dict[str, int] = {}
        self._writers: dict[str, int] = {}
        self._next_event: dict[str, int] = {}

    @classmethod
    def create(cls, path: Path, names: RecorderNames) -> Recorder:
        """A fresh file at `path`; a mapping of an older one keeps living on its own, unseen."""
        fresh = path.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, layout.FILE_BYTES)  # a full disk is an error now, not a SIGBUS later
            recorder = cls(path, mmap.mmap(fd, layout.FILE_BYTES))
            recorder._name(names)
            fresh.replace(path)
        except BaseException:
            os.close(fd)
            fresh.unlink(missing_ok=True)
            raise
        recorder._fd = fd
        return recorder

    @classmethod
    def unshared(cls, path: Path, names: RecorderNames) -> Recorder:
        """For a supervisor that has no room for the file at `path`, and has to say so."""
        recorder = cls(path, mmap.mmap(-1, layout.FILE_BYTES))
        recorder._name(names)
        return recorder

    def _name(self, names: RecorderNames) -> None:
        self._names = names
        _write_names(self._bytes, names)
        self._find_names()

    def _find_names(self) -> None:
        """Once: whatever is written over the file later, this process knows its places."""
        self._mirrors, self._writers = mirror_slots(self._bytes), writer_slots(self._bytes)
        self._next_event = dict.fromkeys(self._writers, 0)

    def copied(self) -> bytes:
        """The whole file as it is just now. Its creator's has the header and the names that it was given: what is left
        of a file that was written over can be read."""
        copy = bytearray(self._bytes)
        if self._names is not None:
            _write_names(memoryview(copy), self._names)
        return bytes(copy)

    def make_whole(self) -> int | None:
        """The bytes that were left of a file that was cut; the rest is zeros now. None: it was whole. To touch
        a page that the file no longer has would end the process by SIGBUS. Raises OSError when there is no room."""
        left = layout.FILE_BYTES if self._fd < 0 else os.fstat(self._fd).st_size
        if left >= layout.FILE_BYTES:
            return None
        os.posix_fallocate(self._fd, 0, layout.FILE_BYTES)
        return left

    @classmethod
    def attach(cls, path: Path) -> Recorder:
        """Raises RecorderError, FileNotFoundError."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != layout.FILE_BYTES:
                raise RecorderError(f"{path}: {os.fstat(fd).st_size} bytes, a flight recorder has {layout.FILE_BYTES}")
            recorder = cls(path, mmap.mmap(fd, layout.FILE_BYTES))
        finally:
            os.close(fd)
        told = recorder._numbers[Header.MAGIC], recorder._numbers[Header.VERSION]
        if told != (layout.MAGIC, layout.VERSION):
            raise RecorderError(f"{path}: magic and version are {told}, not {(layout.MAGIC, layout.VERSION)}")
        recorder._find_names()
        return recorder

    def row(self, name: str) -> Row:
        """Raises RecorderError when the file has no row of that name."""
        wanted = name.encode().ljust(layout.NAME_BYTES, b"\0")
        for index in range(layout.ROWS):
            at = layout.row_at(index)
            if self._bytes[at : at + layout.NAME_BYTES] == wanted:
                base = (at + layout.NAME_BYTES) // W
                doing = (base + layout.FIELDS) * W
                return Row(self._numbers, self._bytes[doing : doing + layout.DOING_BYTES], base, name)
        raise RecorderError(f"{self.path}: no row {name!r}")

    @property
    def view(self) -> memoryview:
        """The live mapping; `bytes` of it is a copy of the whole file as it is just now."""
        return self._bytes

    @property
    def readiness(self) -> Readiness:
        """Its writer stores it again and again; a value that is no readiness was written by another process, and is not
        READY."""
        try:
            return Readiness(self._numbers[Header.READINESS])
        except ValueError:
            return Readiness.NOT_READY

    @readiness.setter
    def readiness(self, word: Readiness) -> None:
        self._numbers[Header.READINESS] = word

    def mirror(self, name: str, value: object) -> None:
        """JSON; what does not fit is told as such. An odd sequence number means: being written. Raises RecorderError
        when the file has no mirror of that name."""
        data = json.dumps(value, separators=(",", ":")).encode()
        if len(data) > layout.MIRROR_BYTES:
            data = json.dumps({"too_long": len(data)}).encode()
        if name not in self._mirrors:
            raise RecorderError(f"{self.path}: no mirror {name!r}")
        at = layout.mirror_at(self._mirrors[name])
        base, start = at // W, at + layout.MIRROR_HEAD_BYTES
        sequence = self._numbers[base] | 1  # a writer that died in the middle left it odd
        self._numbers[base] = sequence
        self._bytes[start : start + len(data)] = data
        self._numbers[base + 1], self._numbers[base + 2] = len(data), time.monotonic_ns()
        self._numbers[base] = sequence + 1 & MASK

    def step_sent(self, number: int, frame: bytes, chain: bytes, tokens: int, rows: int, expected_ns: int) -> None:
        """A step record leaves. The number is stored last: until then the slot reads as empty."""
        at = layout.step_at(number % layout.STEPS)
        put, base = self._numbers, at // W
        put[base + StepField.NUMBER] = 0
        put[base + StepField.SENT_AT], put[base + StepField.DONE_AT] = time.monotonic_ns(), 0
        put[base + StepField.FRAME_BYTES], put[base + StepField.TOKENS] = len(frame), tokens
        put[base + StepField.ROWS], put[base + StepField.EXPECTED_NS] = rows, expected_ns
        put[base + StepField.CHAIN] = int.from_bytes(chain[:8], "little")
        kept = frame[: layout.STEP_FRAME_BYTES]
        start = at + layout.STEP_HEAD_BYTES
        self._bytes[start : start + len(kept)] = kept
        put[base + StepField.NUMBER] = number + 1  # 0 is an empty slot, and steps count from 0

    def step_done(self, number: int) -> None:
        base = layout.step_at(number % layout.STEPS) // W
        self._numbers[base + StepField.DONE_AT] = time.monotonic_ns()

    def event(self, writer: str, text: str) -> None:
        """A line into the writer's ring; from one thread of its process, or under its interpreter lock. Raises
        RecorderError when the file has no such writer."""
        if writer not in self._writers:
            raise RecorderError(f"{self.path}: no writer {writer!r}")
        number = self._next_event[writer] = self._next_event[writer] + 1
        at = layout.event_at(self._writers[writer], number % layout.EVENTS)
        data = text.encode(errors="replace")[: layout.EVENT_TEXT_BYTES].ljust(layout.EVENT_TEXT_BYTES, b"\0")
        base, start = at // W, at + 2 * W
        self._numbers[base] = 0
        self._bytes[start : start + layout.EVENT_TEXT_BYTES] = data
        self._numbers[base + 1] = time.monotonic_ns()
        self._numbers[base] = number


def mirror_slots(memory: memoryview) -> dict[str, int]:
    """Name -> slot, of the mirrors of a recorder's bytes."""
    places = (layout.mirror_at(slot) + layout.MIRROR_NAME_AT for slot in range(layout.MIRRORS))
    return _slots(memory, places)


def writer_slots(memory: memoryview) -> dict[str, int]:
    """Name -> slot, of the writers of a recorder's bytes."""
    return _slots(memory, (layout.ring_at(slot) for slot in range(layout.WRITERS)))


def _slots(memory: memoryview, places: Iterable[int]) -> dict[str, int]:
    names = [bytes(memory[at : at + layout.NAME_BYTES]).split(b"\0", 1)[0].decode(errors="replace") for at in places]
    return {name: slot for slot, name in enumerate(names) if name}


def _write_names(memory: memoryview, names: RecorderNames) -> None:
    """The header last."""
    for at, name in names.places():
        memory[at : at + layout.NAME_BYTES] = name.encode().ljust(layout.NAME_BYTES, b"\0")
    numbers = memory.cast("Q")
    numbers[Header.VERSION], numbers[Header.FILE_BYTES] = layout.VERSION, layout.FILE_BYTES
    numbers[Header.MAGIC] = layout.MAGIC
