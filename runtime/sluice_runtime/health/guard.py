"""What every supervisor does about its processes' health: watch, answer, keep evidence, say why, and end.

One per container, engine or gateway. Nothing here knows what the processes do.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

from sluice_protocol.service_spec import RECORDER_FILE
from sluice_runtime import fault_points
from sluice_runtime.health.backlog import AcceptMarks
from sluice_runtime.health.evidence import EvidenceLimits, write_bundle
from sluice_runtime.health.incidents import (
    Incident,
    QuarantinePolicy,
    boot_id,
    must_quarantine,
    note_incident,
    seconds_since_boot,
)
from sluice_runtime.health.layout import SUPERVISOR, Readiness
from sluice_runtime.health.reading import Copy, Exit, RowReading
from sluice_runtime.health.recorder import Recorder, RecorderNames
from sluice_runtime.health.service import Service
from sluice_runtime.health.status import debug_routes, probe_routes
from sluice_runtime.health.verdict import Budgets, Kind, Verdict, describe_doing
from sluice_runtime.health.watch import PERIOD_S, Watch
from sluice_runtime.health.watched import Reason
from sluice_runtime.probes import ProbeServer
from sluice_runtime.process.processes import say

EXIT_DEAD, EXIT_WEDGED = 1, 3
EVIDENCE_S = 10.0
# For the message, and again for the list of incidents: files of a filesystem that may hang as well.
NOTE_S = 3.0
# Kubernetes keeps the last 4096 bytes of a termination message.
MAX_MESSAGE_BYTES = 4096
# In the run directory, where no other place is named.
TERMINATION = "termination-log"
# A process that is started again beside others that serve is back sooner; without it the service is not whole.
AWAY_S = 4.0
T = TypeVar("T")


@dataclass
class Policy:
    budgets: Budgets = field(default_factory=Budgets)
    quarantine: QuarantinePolicy = field(default_factory=QuarantinePolicy)
    limits: EvidenceLimits = field(default_factory=EvidenceLimits)
    evidence_dir: Path | None = None
    termination_path: Path | None = None
    debug_port: int = 0


def in_daemon_thread(function: Callable[..., T], *args: object) -> asyncio.Future[T]:
    """Not a pool's thread: the interpreter waits for those at its end, and this one may never come back."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(cast(T, result))
        else:
            done.set_exception(error)

    def run() -> None:
        try:
            result, error = function(*args), None
        except BaseException as raised:
            result, error = None, raised
        with contextlib.suppress(RuntimeError):  # the loop is over
            loop.call_soon_threadsafe(tell, result, error)

    try:
        threading.Thread(target=run, name="evidence", daemon=True).start()
    except RuntimeError:  # the system has no room for another: here, then, though the probes wait
        run()
    return done


def write_now(path: Path, data: bytes) -> None:
    """Raises OSError also where writing would wait: a pipe that is not read must not hold up an end."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def _why(error: Exception, within_s: float) -> str:
    """A timeout of asyncio's has no words of its own; the system's errors say enough."""
    if isinstance(error, OSError):
        return str(error) or f"not within {within_s:.0f} s"
    return f"{type(error).__name__}: {error}"


async def _starting(server: ProbeServer, host: str, port: int, name: str) -> int:
    try:
        return await server.start(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise OSError(error.errno, f"{name} port {port} of {host} is taken: name another, or free it") from error
        raise


class Guard:
    """States: starting -> ready <-> not ready -> collecting evidence -> (quarantined ->) over."""

    def __init__(self, service: Service, policy: Policy, clock: Callable[[], float] = time.monotonic) -> None:
        self.service, self.policy = service, policy
        self._no_room: OSError | None = None
        self.recorder = self._make_recorder(service.kind.recorded)
        self.readiness = Readiness.STARTING
        self.traceback = ""  # of what this supervisor met itself
        self._clock = clock
        self.watch = Watch(self.recorder, service.kind.watched, policy.budgets, clock, pids=service.pids)
        self.accepts = [
            AcceptMarks(self.recorder.row(row.name), partial(self._pid_of, row.process))
            for row in service.kind.watched
            if row.accepts
        ]
        self.draining = False
        self._drain_due: tuple[str, float, float] | None = None  # row, its budget, when that is over
        self.collecting = False
        self.quarantined = False
        self.stopping = asyncio.Event()
        self._probes = ProbeServer(probe_routes(self))
        self._debug = ProbeServer(debug_routes(self), only_loopback=True)
        self.probe_port = self.debug_port = 0

    def _make_recorder(self, names: RecorderNames) -> Recorder:
        """Fall back to a private recorder; `start` reports the missing space."""
        path = self.service.run_dir / RECORDER_FILE
        try:
            return Recorder.create(path, names)
        except OSError as error:
            self._no_room = error
            return Recorder.unshared(path, names)

    @property
    def evidence_dir(self) -> Path:
        return self.policy.evidence_dir or self.service.run_dir / "evidence"

    def _pid_of(self, process: str) -> int | None:
        return self.service.pids().get(process)

    async def start(self, host: str, port: int = 0) -> None:
        """Raises OSError, which says which port is taken, or that there is no room for the recorder."""
        if self._no_room is not None:
            raise self._no_room
        self.probe_port = await _starting(self._probes, host, port, "probe")
        self.debug_port = await _starting(self._debug, "127.0.0.1", self.policy.debug_port, "debug")

    async def stop(self) -> None:
        await self._probes.stop()
        await self._debug.stop()

    def exited(self, gone: Exit) -> None:
        """A process has ended that should not have. What it was doing stays in its rows."""
        gone = self.service.kind.named_death(gone)
        self.event(f"{gone.process} ended with {gone.status} {gone.reason}")
        self.watch.exited(gone)

    def forget(self, process: str) -> None:
        """A process has ended as it may, and is started again: its rows are not watched until then."""
        for watched in self.service.kind.watched:
            if watched.process == process:
                self.recorder.row(watched.name).forget()
        self.watch.forgot(process)

    # -- readiness -------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        verdict = self.watch.verdict
        gone = self.watch.away_s > AWAY_S
        away = self.draining or self.collecting or self.quarantined or self.watch.is_silent or gone
        return self.watch.started and not (away or verdict.is_fatal)

    @property
    def is_live(self) -> bool:
        """True while this container should not be killed, also while evidence is collected or quarantine holds (both
        are bounded)."""
        return self.collecting or self.quarantined or not self.watch.verdict.is_fatal

    def started(self, *ports: int) -> None:
        """`ports`: where the process that is guarded accepts."""
        for accept in self.accepts:
            accept.listen(*ports)
        self.watch.started = True
        self.tell_readiness()

    def drain(self, row: str = "", within_s: float = math.inf) -> None:
        """Not ready from now on. `row`: what has to have finished, or to have ended, after so many seconds."""
        self.draining = True
        self._drain_due = (row, within_s, self._clock() + within_s)
        self.tell_readiness()

    def drained(self) -> None:
        """In time. It goes on, not ready, with nothing to do."""
        self._drain_due = None
        self.event("drained")

    def _overdue_drain(self) -> Verdict | None:
        """A step that is under way, and only slow, may end first."""
        if self._drain_due is None or self._clock() <= self._drain_due[2]:
            return None
        name, budget_s, due = self._drain_due
        row = self._row(name)
        step_s = self.policy.budgets.factor * row.expected_ns / 1e9 if row.pending else 0.0
        return self.stalled_drain(name, budget_s) if self._clock() > due + step_s else None

    def stalled_drain(self, name: str, budget_s: float) -> Verdict:
        """What was asked to end has not, within more than it may take: it hangs, whatever the floor is."""
        row = self._row(name)
        return Verdict(Kind.WEDGED, Reason.DRAIN_STALLED, name, describe_doing(row), budget_s, budget_s, row.pending)

    def _row(self, name: str) -> RowReading:
        return Copy(self.recorder.view).rows().get(name, RowReading(name))

    def failed(self, error: Exception) -> Verdict:
        """Of what this supervisor met itself and does not know: its end, by name."""
        self.traceback = "".join(traceback.format_exception(error))
        print(self.traceback, file=sys.stderr, flush=True)
        detail = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return Verdict(Kind.DEAD, Reason.SUPERVISOR_FAILED, "supervisor", "watching", detail=detail)

    def tell_readiness(self) -> None:
        """In our own memory first: what the recorder has may be anybody's."""
        self._make_whole()
        word = Readiness.READY if self.is_ready else Readiness.NOT_READY if self.watch.started else Readiness.STARTING
        word = Readiness.QUARANTINED if self.quarantined else word
        if word is not self.readiness:
            self.readiness = word
            self.event(f"readiness: {word.name.lower()}")
        self.recorder.readiness = word

    def event(self, text: str) -> None:
        self._make_whole()
        self.recorder.event(SUPERVISOR, text)

    def _make_whole(self) -> None:
        """Before every touch of what may lie behind a cut."""
        if (left := self.recorder.make_whole()) is not None:
            self.recorder.event(SUPERVISOR, f"the recorder had been cut to {left} bytes")
            say("recorder-cut", bytes=left, path=str(self.recorder.path))

    # -- the watch -------------------------------------------------------------------------------------------------

    async def run(self) -> Verdict:
        """Until something is wedged or dead. Whatever it raises is for `failed`."""
        last = Kind.IDLE
        while True:
            fault_points.reach("supervisor.turn")
            self._make_whole()
            for accept in self.accepts:
                accept.look()
            verdict = self.watch.look()
            if not verdict.is_fatal and (overdue := self._overdue_drain()) is not None:
                verdict = overdue
            if verdict.kind is not last:
                if Kind.SLOW in (verdict.kind, last) or verdict.is_fatal:
                    self.event(f"verdict: {verdict}")
                    say("verdict", **verdict.as_dict())
                last = verdict.kind
            self.tell_readiness()
            if verdict.is_fatal:
                return verdict
            await asyncio.sleep(PERIOD_S)

    async def close(self, verdict: Verdict) -> int:
        """After a fatal verdict: evidence, the one line, quarantine if it is due. The exit status.

        The processes are left as they are until this returns: what is stuck is the evidence.
        """
        self.watch.verdict = verdict
        self.collecting = True
        self.tell_readiness()
        message = str(verdict)
        say("incident", message=message, **verdict.as_dict())
        bundle = await self._collect(verdict)
        await self._write_message(message, bundle)
        incidents = await self._note(verdict, message)
        self.collecting = False
        # Without probes a quarantine could not be seen, and nothing has begun that a person could look at.
        has_begun = bool(self.debug_port)
        if has_begun and must_quarantine(incidents, boot_id(), seconds_since_boot(), self.policy.quarantine):
            await self._hold(message, len(incidents))
        return EXIT_WEDGED if verdict.kind is Kind.WEDGED else EXIT_DEAD

    async def _collect(self, verdict: Verdict) -> str:
        """Where the bundle is, or why there is none: a full disk must not keep a wedged service alive."""
        found: list[Path] = []
        try:
            work = in_daemon_thread(
                write_bundle,
                self.evidence_dir,
                self.service.run_dir,
                self.recorder,
                verdict,
                {**self.service.pids(), **self.service.others()},
                dict(self.service.about()) | ({"traceback": self.traceback} if self.traceback else {}),
                self.policy.limits,
                lambda: fault_points.reach("supervisor.evidence"),
                found.append,
            )
            async with asyncio.timeout(EVIDENCE_S):
                bundle = await work
        except Exception as error:  # no defect of ours may keep the message from being written
            if not found:
                why = f"no evidence: {_why(error, EVIDENCE_S)}"
                self.event(why)
                say("evidence-failed", error=why)
                return why
            self.event(f"evidence is not complete: {_why(error, EVIDENCE_S)}")
            bundle = found[0]
        self.event(f"evidence: {bundle}")
        say("evidence", path=str(bundle))
        return f"evidence: {bundle}"

    async def _write_message(self, message: str, bundle: str) -> None:
        path = self.policy.termination_path or self.service.run_dir / TERMINATION
        data = f"{message}; {bundle}\n".encode(errors="replace")[:MAX_MESSAGE_BYTES]
        try:
            async with asyncio.timeout(NOTE_S):
                await in_daemon_thread(write_now, path, data)
        except Exception as error:
            print(f"{path}: {_why(error, NOTE_S)}; the message was: {message}", file=sys.stderr, flush=True)

    async def _note(self, verdict: Verdict, message: str) -> list[Incident]:
        """All that are known; this one alone where the list cannot be read or written."""
        incident = Incident(boot_id(), seconds_since_boot(), verdict.reason, verdict.culprit, message)
        try:
            async with asyncio.timeout(NOTE_S):
                return await in_daemon_thread(note_incident, self.evidence_dir, incident)
        except Exception as error:
            print(f"{self.evidence_dir}: {_why(error, NOTE_S)}", file=sys.stderr, flush=True)
            return [incident]

    async def _hold(self, message: str, count: int) -> None:
        """Stay up, not ready, so that a person can look."""
        hold_s = self.policy.quarantine.hold_s
        self.quarantined = True
        self.tell_readiness()
        self.event(f"quarantined for {hold_s:.0f} s after {count} incidents")
        say("quarantined", seconds=hold_s, incidents=count, message=message)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(hold_s):
                await self.stopping.wait()
