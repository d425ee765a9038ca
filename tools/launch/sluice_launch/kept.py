"""Processes that are kept running, in an event loop: each in a session of its own, bound to this process's life,
started again when it dies. What they say on stdout, a JSON object a line, drives everything; the rest goes to a log."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sluice_launch.commands import Command
from sluice_launch.logs import begin_log, bound_log, last_words
from sluice_runtime.process.processes import MAX_EVENT_BYTES, die_with_parent, json_lines

Event = dict[str, object]
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.2, 5.0
STOP_S = 30.0  # an engine drains for 20 s at most and its supervisor waits 25
LOG_LOOK_S = 1.0


class StartFailed(Exception):
    """A service died before it was ready for the first time: nothing to restart, something to tell."""

    def __init__(self, name: str, cause: str, last_words: str) -> None:
        super().__init__(f"{name} did not start: {cause}")
        self.name, self.cause, self.last_words = name, cause, last_words


@dataclass
class Service:
    """`on_ready` is told of every start. `on_death` gets the name, the cause and what it said last. `log` None: stderr
    is left where it is."""

    command: Command
    log: Path | None
    on_ready: Callable[[Event], None]
    on_event: Callable[[str, Event], None]
    on_death: Callable[[str, str, str], None]
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    _process: asyncio.subprocess.Process | None = None
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _superseded: asyncio.Event = field(default_factory=asyncio.Event)
    _retired: list[tuple[asyncio.subprocess.Process, asyncio.Task[int]]] = field(default_factory=list)
    _cause: str = ""

    @property
    def name(self) -> str:
        return self.command.name

    def begin(self) -> asyncio.Task[None]:
        """Run it, and run it again, until `stop`. The task raises StartFailed when the first start fails."""
        self.task = asyncio.get_running_loop().create_task(self._keep(), name=self.name)
        return self.task

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL when that is not enough. Afterwards the process is gone and reaped."""
        self._stopping.set()
        if self.task is None:
            return
        self._signal(signal.SIGTERM)
        await asyncio.wait({self.task}, timeout=STOP_S)
        self.kill()
        await asyncio.gather(self.task, *(following for _, following in self._retired), return_exceptions=True)

    def kill(self) -> None:
        self._stopping.set()
        self._signal(signal.SIGKILL)
        for process, _ in self._retired:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGKILL)

    def condemn(self, cause: str) -> None:
        """It is past helping: end it now, for this reason unless it has given its own, and let it be started again."""
        self._cause = self._cause or cause
        self.on_event(self.name, {"event": "condemned", "cause": cause})
        self._signal(signal.SIGKILL)

    def supersede(self, cause: str) -> None:
        """It is past helping, but others live by it: start another process in its place now, and keep this one until
        `stop`."""
        if self._process is not None and self._process.returncode is None and self.ready.is_set():
            self.on_event(self.name, {"event": "superseded", "cause": cause})
            self._superseded.set()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _keep(self) -> None:
        backoff, started_once = FIRST_BACKOFF_S, False
        while not self._stopping.is_set():
            cause, words = await self._life()
            if self._superseded.is_set():
                self._superseded.clear()
                self.ready.clear()
                started_once = True  # One that does not come up in its place is tried again, as after any death.
                continue
            if self._stopping.is_set():
                return
            if not self.ready.is_set() and not started_once:
                raise StartFailed(self.name, cause, words)
            backoff = FIRST_BACKOFF_S if self.ready.is_set() else min(2 * backoff, LAST_BACKOFF_S)
            started_once = True
            self.ready.clear()
            self.on_death(self.name, cause, words)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff):
                    await self._stopping.wait()

    async def _life(self) -> tuple[str, str]:
        """(how one ended, what it said last). One that cannot begin, for want of room, memory or processes, has too."""
        try:
            status = await self._run_once()
        except OSError as error:
            return f"it cannot be started: {error}", ""
        return self._cause or _ended(status), "" if self._cause or self.log is None else last_words(self.log)

    async def _run_once(self) -> int:
        parent = os.getpid()
        self._cause = ""
        log = None if self.log is None else begin_log(self.log)
        try:
            process = await asyncio.create_subprocess_exec(
                *self.command.whole,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                limit=MAX_EVENT_BYTES,
                stderr=log,
                start_new_session=True,  # Ctrl-C is this process's to pass on, in order
                preexec_fn=lambda: die_with_parent(parent, signal.SIGTERM),
            )
        finally:
            if log is not None:
                log.close()
        self._process = process
        if self._stopping.is_set():
            self._signal(signal.SIGTERM)
        bounding = None if self.log is None else asyncio.get_running_loop().create_task(_keep_bounded(self.log))
        following = asyncio.get_running_loop().create_task(self._follow(process))
        superseded = asyncio.get_running_loop().create_task(self._superseded.wait())
        try:
            await asyncio.wait({following, superseded}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                return following.result()
            self._retired.append((process, following))
            return 0
        finally:
            superseded.cancel()
            if bounding is not None:
                bounding.cancel()

    async def _follow(self, process: asyncio.subprocess.Process) -> int:
        assert process.stdout is not None
        async for event in json_lines(process.stdout, self._note):
            if self.command.is_ready(event):
                self.on_ready(event)
                self.ready.set()
            elif event.get("event") == "died":
                self._cause = str(event.get("cause", event.get("detail", "")))
            self.on_event(self.name, event)
        return await process.wait()

    def _note(self, line: bytes) -> None:
        if self.log is None:
            sys.stderr.write(line.decode(errors="replace"))
            return
        with contextlib.suppress(OSError), self.log.open("ab") as log:
            log.write(line)


async def _keep_bounded(log: Path) -> None:
    while True:
        await asyncio.sleep(LOG_LOOK_S)
        bound_log(log)


def _ended(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
