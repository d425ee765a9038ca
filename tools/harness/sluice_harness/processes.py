"""Processes under test: started in sessions of their own, heard on stdout, ended by pid, checked to be gone."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

DEADLINE_S = 90.0
POLL_S = 0.02
T = TypeVar("T")


class Late(Exception):
    """Something did not come about in its time; the message says what."""


def eventually(check: Callable[[], T | None], what: str, timeout_s: float = 30.0) -> T:
    """The first true value of `check`. Raises Late."""
    deadline = time.monotonic() + timeout_s
    while not (value := check()):
        if time.monotonic() > deadline:
            raise Late(f"{what}: not within {timeout_s:.0f} s")
        time.sleep(POLL_S)
    return value


@dataclass(frozen=True, slots=True)
class Event:
    """A line that a process printed. `at`: monotonic seconds of its arrival here."""

    at: float
    fields: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.fields.get("event", "url" if "url" in self.fields else ""))


class Process:
    """`log` gets stderr, and what is printed without being an event."""

    def __init__(self, argv: Sequence[str], log: Path) -> None:
        self._log = log.open("ab")
        self.popen = subprocess.Popen(
            [sys.executable, *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        self.events: list[Event] = []
        self._fresh: queue.Queue[Event | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name=f"read-{self.popen.pid}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.popen.pid

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            try:
                fields = json.loads(line)
            except ValueError:
                fields = None
            if isinstance(fields, dict):
                event = Event(time.monotonic(), fields)
                self.events.append(event)
                self._fresh.put(event)
        self._fresh.put(None)

    def wait_for(self, name: str, timeout_s: float = DEADLINE_S) -> Event:
        """The next event of that name. Raises Late, also when the process ends without it."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                event = self._fresh.get(timeout=max(0.05, deadline - time.monotonic()))
            except queue.Empty:
                raise Late(f"no {name!r} within {timeout_s:.0f} s") from None
            if event is None:
                self._fresh.put(None)
                told = [event.fields for event in self.events[-3:]]
                raise Late(f"it ended with {self.popen.wait()} before {name!r}: {told}")
            if event.name == name:
                return event

    def seen(self, name: str) -> Event | None:
        return next((event for event in self.events if event.name == name), None)

    def wait(self, timeout_s: float) -> int:
        """Its status. Raises Late."""
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise Late(f"process {self.pid} does not end within {timeout_s:.0f} s") from None

    def end(self, timeout_s: float = 40.0, number: signal.Signals = signal.SIGTERM) -> int:
        """SIGTERM, and SIGKILL when that is not enough. Afterwards it is gone and reaped."""
        if self.popen.poll() is None:
            self.popen.send_signal(number)
            try:
                self.popen.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.popen.kill()
        status = self.popen.wait(10)
        self._reader.join(10)
        assert self.popen.stdout is not None
        self.popen.stdout.close()
        self._log.close()
        return status


def is_running(pid: int) -> bool:
    """Neither gone nor a zombie."""
    return state_of(pid) not in ("", "Z", "X")


def state_of(pid: int, task: Path | None = None) -> str:
    """The kernel's letter; "" where there is no such process."""
    try:
        return ((task or Path(f"/proc/{pid}")) / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def stop_process(pid: int) -> None:
    """SIGSTOP, and wait until every thread has stopped: the call returns before that. Raises Late."""
    import os

    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: _all_stopped(pid), f"process {pid} stops", 20.0)


def _all_stopped(pid: int) -> bool:
    return all(state_of(pid, task) in ("T", "t", "") for task in Path(f"/proc/{pid}/task").iterdir())
