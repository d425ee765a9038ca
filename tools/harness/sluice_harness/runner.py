"""Rows, one after the other, on real processes. A service that a row leaves alive is used again for the next."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sluice_faults import Action, Order, place, reached, withdraw
from sluice_harness.client import NoAnswer
from sluice_harness.inject import Injected, inject, order_of
from sluice_harness.judge import is_self_told, judge_end, judge_evidence, judge_verdict
from sluice_harness.observe import (
    EXIT_S,
    HEALTHY_FLOORS,
    PATIENCE_S,
    Seen,
    allowed_s,
    seen_of,
    wait_for_end,
    watch_healthy,
)
from sluice_harness.phases import Work, enter, fresh_prompt
from sluice_harness.prober import Probing
from sluice_harness.profiles import PROFILES, SHORT_ANSWER
from sluice_harness.results import Result, append_result, read_results
from sluice_harness.rows import Outcome, Phase, Row
from sluice_harness.service import TERMINATION, Service
from sluice_harness.stack import Stack
from sluice_harness.tables import run_table
from sluice_launch.process import Late, eventually

Say = Callable[[Result], None]


@dataclass(frozen=True, slots=True)
class Scale:
    """Seconds of every budget. A kubelet's period is 10."""

    floor_s: float = 5.0
    start_s: float = 10.0
    probing: Probing = field(default_factory=Probing)

    @classmethod
    def of(cls, floor_s: float) -> Scale:
        return cls(floor_s, max(15.0, 3 * floor_s), Probing())

    @classmethod
    def unscaled(cls) -> Scale:
        return cls(30.0, 120.0, Probing(period_s=10.0))

    @property
    def health(self) -> dict[str, float]:
        return {"floor_s": self.floor_s, "start_s": self.start_s}


class Runner:
    """Use as a context manager: it keeps one stack running, of the kind that the last row needed."""

    def __init__(self, scale: Scale) -> None:
        self.scale = scale
        self._stack: Stack | None = None

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    def run(self, row: Row, turn: int = 0) -> Result:
        """Never raises for what a row brings about: that is one of its problems."""
        began = time.monotonic()
        if row.is_table:
            return run_table(row, turn)
        attempt = _Attempt(row, self.scale)
        try:
            attempt.run(self._stack_for(row))
        except (Late, NoAnswer, OSError, AssertionError) as error:
            attempt.problems.append(f"{type(error).__name__}: {error}")
        if attempt.problems:
            self._close_broken(attempt)
        return attempt.result(turn, time.monotonic() - began)

    def _stack_for(self, row: Row) -> Stack:
        profile = PROFILES[row.stack]
        if self._stack is not None and self._stack.profile is not profile:
            self._close()
        if self._stack is None:
            self._stack = Stack(profile, self.scale.health, self.scale.probing).__enter__()
        return self._stack

    def _close(self) -> None:
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.__exit__()

    def _close_broken(self, attempt: _Attempt) -> None:
        """What a failed row leaves behind is nothing to start the next one from."""
        try:
            self._close()
        except (AssertionError, OSError) as error:
            attempt.problems.append(f"closing: {error}")


class _Attempt:
    """One row's turn."""

    def __init__(self, row: Row, scale: Scale) -> None:
        self.row, self.scale = row, scale
        self.problems: list[str] = []
        self.seen: Seen | None = None
        self.exit: int | None = None
        self.detect_s: float | None = None
        self.allowed: float | None = None
        self.bundles_before: set[Path] = set()

    def result(self, turn: int, wall_s: float) -> Result:
        told = self.seen
        healthy = self.row.expected.outcome is Outcome.HEALTHY
        return Result(
            self.row.id,
            turn,
            self.scale.floor_s,
            tuple(self.problems),
            "" if told is None and not healthy else (Outcome.HEALTHY if told is None else told.outcome).value,
            "" if told is None else told.reason,
            "" if told is None else told.culprit,
            self.exit,
            self.detect_s,
            self.allowed,
            round(wall_s, 2),
            healthy and told is not None,
        )

    def run(self, stack: Stack) -> None:
        row = self.row
        engine = stack.engine(row.role)
        work, injected = Work(), Injected(time.monotonic())
        self.bundles_before = set(engine.bundles())
        try:
            if row.phase is Phase.LOADING:
                if row.fault.get("before"):
                    injected = inject(stack, engine, row.fault, work)
                engine = begin_loading(stack, engine, row)
            else:
                work = enter(stack, row.phase)
            if row.phase is Phase.DRAINING:
                stack.prober.forget(engine.name)
                engine.process.popen.terminate()
                engine.process.wait_for("draining")
            if not is_met_at_load(row) and not row.fault.get("before"):
                injected = inject(stack, engine, row.fault, work)
            if row.expected.outcome is Outcome.HEALTHY:
                self._stay_healthy(stack, engine, work)
            else:
                self._end(stack, engine, injected)
        finally:
            injected.lift()
            self.problems += injected.problems
            work.release()
            for faults in {service.faults for service in stack.services.values()}:
                for path in faults.glob("*.json"):
                    path.unlink()
        self._serve_on(stack, work)

    def _end(self, stack: Stack, engine: Service, injected: Injected) -> None:
        row, expected = self.row, self.row.expected
        self.allowed = allowed_s(row, stack)
        self.seen = wait_for_end(stack, engine, (self.allowed or 0.0) + PATIENCE_S)
        self.detect_s = max(0.0, self.seen.at - injected.at)
        self.problems += judge_verdict(expected, self.seen, self.detect_s, self.allowed)
        self.exit = engine.process.wait(EXIT_S)
        with contextlib.suppress(Late):
            eventually(lambda: not engine.left_behind(), "its processes are gone", 10.0)
        self.problems += judge_end(expected, self.exit, engine.left_behind())
        if is_self_told(self.seen.outcome):
            fresh = [bundle for bundle in engine.bundles() if bundle not in self.bundles_before]
            self.problems += judge_evidence(expected, engine.run_dir / TERMINATION, fresh, stack.key)

    def _stay_healthy(self, stack: Stack, engine: Service, work: Work) -> None:
        def until() -> bool:
            if self.row.phase is Phase.LOADING:
                return engine.process.seen("ready") is not None
            waits = "request" in self.row.fault or "load" in self.row.fault
            return not waits or all(chat.over.is_set() for chat in work.chats)

        self.seen = watch_healthy(stack, until, HEALTHY_FLOORS * self.scale.floor_s)
        if self.seen is not None:
            self.problems.append(f"somebody healthy was killed: {self.seen.message}")

    def _serve_on(self, stack: Stack, work: Work) -> None:
        """The service is started again as `sluice up` does it; what was in flight is answered, and so is what comes
        next; the books are exact; nobody else was named."""
        self._check_others(stack)
        revive(stack)
        for chat in work.chats:
            chat.wait()
            whole = chat.is_answered and len(chat.text) == chat.max_tokens
            if not whole and not self.row.lost and not is_cut_short(stack, chat.finish):
                self.problems.append(f"a request in flight: {chat.error or chat.finish}, {len(chat.text)} characters")
        after = stack.chat(fresh_prompt("are you well?"), SHORT_ANSWER)
        after.wait(60.0)
        if not after.is_answered:
            self.problems.append(f"the next request: {after.error or 'no answer'}")
        for engine in stack.engines.values():
            engine.settled()

    def _check_others(self, stack: Stack) -> None:
        if self.row.fault.get("process") == "zygote" or self.row.expected.outcome is Outcome.HEALTHY:
            return
        for engine in stack.services.values():
            incident = engine.process.seen("incident")
            if incident is not None and engine.role != self.row.role:
                self.problems.append(f"{engine.name} was named too: {seen_of(incident).message}")


def is_cut_short(stack: Stack, finish: str) -> bool:
    """A real model stops where it likes."""
    return stack.profile.scripted is None and finish == "stop"


def is_met_at_load(row: Row) -> bool:
    """The fault's order lies there before its engine starts, which meets it by itself."""
    return row.phase is Phase.LOADING and str(row.fault.get("point", "")).startswith("rank.")


def begin_loading(stack: Stack, engine: Service, row: Row) -> Service:
    """Ends the engine and starts it again, and catches it at its rank's load. Raises Late."""
    stack.prober.forget(engine.name)
    engine.process.end()
    if row.fault.get("before"):
        return begin_beside(stack, engine)
    point = str(row.fault["point"]) if is_met_at_load(row) else "rank.load"
    order = order_of(row.fault, stack.health["floor_s"]) if is_met_at_load(row) else Order(Action.BLOCK)
    place(engine.faults, point, order)
    fresh = stack.engines[engine.name] = stack.spawn(engine.role, engine.name)
    fresh.note_pids()
    stack.watch(engine.name)
    eventually(lambda: reached(engine.faults, point), f"{point} is reached")
    fresh.note_pids()
    if row.expected.outcome is Outcome.HEALTHY and not is_met_at_load(row):
        withdraw(engine.faults, point)
    return fresh


def begin_beside(stack: Stack, engine: Service) -> Service:
    """Starts it while something that it needs is broken: nothing more of it can be waited for."""
    fresh = stack.engines[engine.name] = stack.spawn(engine.role, engine.name)
    fresh.note_pids()
    stack.watch(engine.name)
    return fresh


def revive(stack: Stack) -> None:
    """Whoever has ended, or is about to, is started again; who only loads is waited for. Raises Late."""
    zygote = stack.zygote
    if zygote is not None and zygote.popen.poll() is not None:
        for engine in stack.engines.values():
            engine.process.wait(EXIT_S)
        zygote.end()
        stack.start_zygote()
    for name, service in stack.services.items():
        if service.process.seen("incident") is not None or _is_stopping(service):
            service.process.wait(EXIT_S)
        if service.process.popen.poll() is not None:
            stack.restart(name)
        elif service.ready is None:
            service.wait_ready()
            stack.write_fleet()
    stack.wait_routable()


def _is_stopping(engine: Service) -> bool:
    return engine.process.seen("draining") is not None


def run_rows(
    rows: Sequence[Row], scale: Scale, *, repeat: int = 1, results: Path | None = None, say: Say = lambda result: None
) -> list[Result]:
    """All rows `repeat` times; those that `results` has as good at this floor are not run again."""
    known = [] if results is None else read_results(results)
    done = {(r.id, r.turn): r for r in known if r.is_ok and r.floor_s == scale.floor_s}
    told = []
    with Runner(scale) as runner:
        for turn in range(repeat):
            for row in rows:
                result = done.get((row.id, turn))
                if result is None:
                    result = runner.run(row, turn)
                    if results is not None:
                        append_result(results, result)
                say(result)
                told.append(result)
    return told
