"""The poller's thread: it alone touches the puller, and through it the transport. Commands in, reports out."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

from sluice_engine.transfer.errors import TransferError
from sluice_engine.transfer.marks import SidecarMarks
from sluice_engine.transfer.messages import (
    Allow,
    AskStats,
    Attach,
    Attached,
    Command,
    Detach,
    Forget,
    Ping,
    Pull,
    Report,
    Stats,
    Stop,
)
from sluice_engine.transfer.puller import Puller
from sluice_runtime import fault_points
from sluice_runtime.health.layout import Phase

Emit = Callable[[Sequence[Report]], None]
# What is in flight is looked at about as often.
HELP_S = 200e-6


def apply_command(puller: Puller, command: Command, now: float, turns: int = 0) -> Report | None:
    """Carry it out; the answer, where one is due at once."""
    match command:
        case Attach(source):
            try:
                puller.attach(source)
            except TransferError as error:
                puller.counters[f"attach_{error.reason}"] += 1
                return Attached(source.incarnation, error.reason, str(error))
            return Attached(source.incarnation)
        case Detach(peer):
            puller.detach(peer, now)
        case Pull(pulls):
            puller.add(pulls.lease_id, pulls.peer, pulls.items, now)
        case Stop(lease_id):
            puller.stop(lease_id, now)
        case Forget(lease_id):
            puller.forget(lease_id, now)
        case Ping(peer):
            puller.ping(peer, now)
        case Allow(pieces):
            puller.allowance = pieces if pieces >= 0 else None
        case AskStats():
            return stats_of(puller, turns)
    return None


def stats_of(puller: Puller, turns: int) -> Stats:
    return Stats(dict(puller.counters), turns, puller.num_leases, puller.num_in_flight, len(puller.stranded))


class Poller:
    """Never waits for a transfer. What ends its loop is given to `died`, and is the death of the process."""

    def __init__(
        self, puller: Puller, emit: Emit, died: Callable[[BaseException], None], marks: SidecarMarks | None = None
    ) -> None:
        self._puller, self._emit, self._died = puller, emit, died
        self._marks = marks or SidecarMarks(None)
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sluice-poller", daemon=True)
        self.turns = 0
        self.in_flight = 0

    def start(self) -> None:
        self._thread.start()

    def put(self, command: Command) -> None:
        self._inbox.put(command)

    def _run(self) -> None:
        self._marks.poller.begin(Phase.POLLING)
        try:
            while True:
                fault_points.reach("sidecar.poll")
                self._turn()
        except BaseException as error:
            self._marks.poller.end(failed=True)
            self._died(error)

    def _help(self) -> bool:
        """Verify pulled records that wait, for HELP_S and one batch at most, until a command comes. False: there were
        none. A turn costs more than the check of small records."""
        until, helped = time.monotonic() + HELP_S, False
        while self._inbox.empty() and time.monotonic() < until and self._puller.help_verify():
            helped = True
        return helped

    def _turn(self) -> None:
        wait = self._puller.idle_for(time.monotonic())
        if wait > 0 and self._help():
            wait = 0.0
        reports: list[Report] = []
        try:
            command = self._inbox.get(timeout=wait) if wait > 0 else self._inbox.get_nowait()
            while True:
                answer = apply_command(self._puller, command, time.monotonic(), self.turns)
                if answer is not None:
                    reports.append(answer)
                command = self._inbox.get_nowait()
        except queue.Empty:
            pass
        reports += self._puller.tick(time.monotonic(), helping=True)
        self.turns += 1
        self._marks.polled(self._puller, time.monotonic())
        self.in_flight = self._puller.num_in_flight
        if not self._puller.num_leases:
            self._puller.check_integrity()
        if reports:
            self._emit(reports)
