"""One life of a process, for callers that wait in a thread. It starts in a session of its own, its stdout is read, and
it is ended by its pid and leaves nothing behind."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from sluice_launch.commands import Command
from sluice_launch.logs import begin_log, last_words
from sluice_runtime.health.proc import state_of

READY_S = 90.0
# An engine drains for 20 s at most, and its supervisor waits for 25.
END_S = 40.0
# Once a process is gone, for what holds its stdout still; and for one that was killed.
REAP_S = 10.0
POLL_S = 0.02
T = TypeVar("T")


class Late(Exception):
    """Something did not come about in its time; the message says what."""


def eventually(check: Callable[[], T | None], what: str, timeout_s: float = 30.0) -> T:
    """The first true value of `check`; polled, for there is nothing to wait on from outside a process. Raises Late."""
    deadline = time.monotonic() + timeout_s
    while not (value := check()):
        if time.monotonic() > deadline:
            raise Late(f"{what}: not within {timeout_s:g} s")
        time.sleep(POLL_S)
    return value


class Event(dict[str, Any]):
    """A line that a process printed. `at`: monotonic seconds of its arrival here."""

    def __init__(self, fields: Mapping[str, Any], at: float) -> None:
        super().__init__(fields)
        self.at = at

    @property
    def name(self) -> str:
        return str(self.get("event", ""))


class Process:
    """`log`: gets stderr; None leaves it where ours is, as a descriptor it goes there. `environment`: beside ours.

    Stdout is read by a thread, so that it can never block on a full pipe; what is no JSON object there is dropped."""

    def __init__(
        self,
        command: Command,
        log: Path | int | None = None,
        *,
        pass_fds: tuple[int, ...] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.is_ready = command.name, command.is_ready
        self._log = log if isinstance(log, Path) else None
        stderr = begin_log(log) if isinstance(log, Path) else log
        try:
            self.popen = subprocess.Popen(
                command.whole,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
                pass_fds=pass_fds,
                env=None if environment is None else os.environ | environment,
            )
        finally:
            if stderr is not None and not isinstance(stderr, int):
                stderr.close()
        self.events: list[Event] = []
        self._fresh: queue.Queue[Event | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name=f"read-{self.pid}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def is_over(self) -> bool:
        """Ended, and reaped by this very look."""
        return self.popen.poll() is not None

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            try:
                fields = json.loads(line)
            except ValueError:
                continue
            if isinstance(fields, dict):
                event = Event(fields, time.monotonic())
                self.events.append(event)
                self._fresh.put(event)
        self._fresh.put(None)

    # -- hearing ---------------------------------------------------------------------------------------------------

    def wait_ready(self, timeout_s: float = READY_S) -> Event:
        """The event that says so. Raises Late, with what it said last where it has ended instead."""
        return self.wait_event(self.is_ready, f"{self.name} is ready", timeout_s)

    def wait_for(self, name: str, timeout_s: float = READY_S) -> Event:
        """The next event of that name. Raises Late, also when the process ends without it."""
        return self.wait_event(lambda event: event.name == name, repr(name), timeout_s)

    def wait_event(
        self, match: Callable[[Event], bool], what: str = "what is waited for", timeout_s: float = READY_S
    ) -> Event:
        """The next event that `match` wants; those before it are passed over. Raises Late, also when the process ends
        without it."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                event = self._fresh.get(timeout=max(0.05, deadline - time.monotonic()))
            except queue.Empty:
                raise Late(f"{what}: not within {timeout_s:g} s; it said last: {self.events[-3:]}") from None
            if event is None:
                self._fresh.put(None)
                raise Late(f"{self.name} ended with {self.popen.wait()} before {what}: {self.last_words()}")
            if match(event):
                return event

    def seen(self, name: str) -> Event | None:
        """The first event of that name so far."""
        return next((event for event in self.events if event.name == name), None)

    def last_words(self) -> str:
        """Its last events, and the end of its log where it has one."""
        words = str([dict(event) for event in self.events[-3:]])
        return words if self._log is None else f"{words}\n{last_words(self._log)}".strip()

    # -- the end ---------------------------------------------------------------------------------------------------

    def wait(self, timeout_s: float) -> int:
        """Its status. Raises Late."""
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise Late(f"{self.name}, process {self.pid}, does not end within {timeout_s:g} s") from None

    def end(self, timeout_s: float = END_S, number: signal.Signals = signal.SIGTERM) -> int:
        """`number`, and SIGKILL when that is not enough: its status. Afterwards it is gone and reaped."""
        if self.popen.poll() is None:
            self.popen.send_signal(number)
            try:
                self.popen.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.popen.kill()
        status = self.popen.wait(REAP_S)
        self._reader.join(REAP_S)
        assert self.popen.stdout is not None
        if not self._reader.is_alive():  # else another process holds it, and closing would wait for the thread
            self.popen.stdout.close()
        return status


# -- processes of any kind ---------------------------------------------------------------------------------------------


def is_running(pid: int) -> bool:
    """Neither gone nor a zombie."""
    return state_of(pid) not in ("", "Z", "X")


def stop_process(pid: int, timeout_s: float = 20.0) -> None:
    """SIGSTOP, and wait until every thread has stopped: the call returns before that, and until then they may answer.
    Raises Late."""
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: _all_stopped(pid), f"process {pid} stops", timeout_s)


def _all_stopped(pid: int) -> bool:
    return all(state_of(pid, int(task.name)) in ("T", "t", "") for task in Path(f"/proc/{pid}/task").iterdir())
