"""What the leader says of its loop in the recorder, in the loop's own words."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from sluice_engine.watched_rows import EngineMirror, EngineWriter
from sluice_runtime.health.layout import IDENTITY, Field, Phase, Readiness
from sluice_runtime.health.recorder import Recorder, Row, unrecorded
from sluice_runtime.health.throughput import Throughput

MIRROR_S = 0.1


class _Sent(NamedTuple):
    tokens: int
    rows: int
    expected_ns: int


class LeaderMarks:
    """`recorder` None: there is no supervisor. Everything here runs on the leader's loop."""

    def __init__(self, recorder: Recorder | None, cold_ns: int = 0) -> None:
        self.recorder = recorder
        self.row: Row = unrecorded("leader.loop") if recorder is None else recorder.row("leader.loop")
        self.queue: Row = unrecorded("leader.queue") if recorder is None else recorder.row("leader.queue")
        self.running: Row = unrecorded("leader.running") if recorder is None else recorder.row("leader.running")
        self.grpc: Row = unrecorded("leader.grpc") if recorder is None else recorder.row("leader.grpc")
        self._throughput = Throughput(cold_ns)
        self._steps: deque[_Sent] = deque()  # under way, oldest first
        self._rows = self._expected_ns = 0  # of all of them
        self._mirrored_ns = self._read = 0

    @property
    def readiness(self) -> Readiness:
        """The supervisor's word; without one, an engine that runs is ready."""
        return Readiness.READY if self.recorder is None else self.recorder.readiness

    def begin(self, phase: Phase) -> None:
        """Of the thread whose loop this is."""
        self.row.begin(phase)
        self.queue.begin(Phase.IDLE)
        self.running.begin(Phase.IDLE)

    def has_read(self, nbytes: int) -> None:
        """Of the weights, for the fingerprint, before anything else has begun: the start goes on."""
        self._read += nbytes
        self.row.count(Field.COUNT_A, self._read)
        self.row.tick()

    def waiting(self, head: int, admissible: int) -> None:
        """Sequences that wait though there is room, and the first of them: it must not stay the first, also while
        steps come and go."""
        self.queue.progress(head)
        self.queue.pending(admissible)
        self.queue.enter(Phase.WAITING if admissible else Phase.IDLE)

    def passed_over(self, since: int, number: int, doing: str) -> None:
        """Sequences that run and that steps leave out, and the first step that did: it must not stay that one, also
        while the others' steps come and go. Steps count from 0, progress from 1."""
        self.running.progress(since + 1)
        self.running.pending(number)
        self.running.doing(doing)
        self.running.enter(Phase.WAITING if number else Phase.IDLE)

    def planning(self) -> None:
        self.row.tick()
        self.row.enter(Phase.PLANNING)

    def sent(self, number: int, frame: bytes, chain: bytes, tokens: int, rows: int) -> None:
        """A step is with the ranks: it must come back. Steps count from 0, progress from 1."""
        expected = self._throughput.expected(tokens)
        self._steps.append(_Sent(tokens, rows or 1, expected))
        self.row.step(number + 1)
        self._under_way(rows or 1, expected)
        self.row.enter(Phase.SERVING)
        if self.recorder is not None:
            self.recorder.step_sent(number, frame, chain, tokens, rows, expected)

    def done(self, number: int, elapsed_ns: int) -> None:
        """`elapsed_ns`: since it was sent, or since the one before was done."""
        step = self._steps.popleft()
        self._throughput.measured(step.tokens, elapsed_ns)
        self.row.progress(number + 1)
        self._under_way(-step.rows, -step.expected_ns)
        self.row.enter(Phase.PUBLISHING)
        if self.recorder is not None:
            self.recorder.step_done(number)

    def _under_way(self, rows: int, expected_ns: int) -> None:
        """So many more."""
        self._rows += rows
        self._expected_ns += expected_ns
        self.row.expect(self._expected_ns)
        self.row.pending(self._rows)

    def published(self) -> None:
        """What comes next on this loop may be anybody's callback."""
        self.row.enter(Phase.SERVING)

    def resting(self, admissible: int) -> None:
        """No step is under way. `admissible`: sequences that wait though there is room for them."""
        self.row.pending(admissible)
        self.row.enter(Phase.SERVING)

    def say(self, text: str) -> None:
        if self.recorder is not None:
            self.recorder.event(EngineWriter.LEADER, text)

    def is_mirror_due(self) -> bool:
        return self.recorder is not None and time.monotonic_ns() - self._mirrored_ns > MIRROR_S * 1e9

    def mirror(self, books: object, leases: object) -> None:
        if self.recorder is not None:
            self._mirrored_ns = time.monotonic_ns()
            self.recorder.mirror(EngineMirror.BOOKS, books)
            self.recorder.mirror(EngineMirror.LEASES, leases)

    def identity(self, told: object) -> None:
        """Whose certificate this engine has, and until when."""
        if self.recorder is not None:
            self.recorder.mirror(IDENTITY, told)
