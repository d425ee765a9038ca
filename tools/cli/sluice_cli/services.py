"""The processes that `sluice up` starts: each in a session of its own, bound to this process's life, restarted when it
dies. What they say on stdout, a JSON object a line, drives everything."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from sluice_engine.processes import die_with_parent

Event = dict[str, object]
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.2, 5.0
STOP_S = 30.0


class StartFailed(Exception):
    """A service died before it was ready for the first time: nothing to restart, something to tell."""


@dataclass
class Service:
    """`argv` after the interpreter; `is_ready` recognises the event that says so; `on_ready` is told of every start."""

    name: str
    argv: tuple[str, ...]
    is_ready: Callable[[Event], bool]
    on_ready: Callable[[Event], None]
    on_event: Callable[[str, Event], None]
    on_restart: Callable[[str, str], None]
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    process: asyncio.subprocess.Process | None = None
    stopping: bool = False
    _cause: str = ""

    async def keep(self) -> None:
        """Run it, and run it again, until `stop`. Raises StartFailed when the first start fails."""
        backoff = FIRST_BACKOFF_S
        started_once = False
        while not self.stopping:
            status = await self._run_once()
            if self.stopping:
                return
            cause = self._cause or f"exit status {status}"
            if not self.ready.is_set() and not started_once:
                raise StartFailed(f"{self.name} did not start: {cause}")
            backoff = FIRST_BACKOFF_S if self.ready.is_set() else min(2 * backoff, LAST_BACKOFF_S)
            started_once = True
            self.ready.clear()
            self.on_restart(self.name, cause)
            await asyncio.sleep(backoff)

    async def _run_once(self) -> int:
        parent = os.getpid()
        self._cause = ""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *self.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is this process's to pass on, in order
            preexec_fn=lambda: die_with_parent(parent, signal.SIGTERM),
        )
        self.process = process
        async for event in _events(process):
            if self.is_ready(event):
                self.on_ready(event)
                self.ready.set()
            elif event.get("event") == "died":
                self._cause = str(event.get("cause", event.get("detail", "")))
            self.on_event(self.name, event)
        return await process.wait()

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL when that is not enough."""
        self.stopping = True
        process = self.process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _events(process: asyncio.subprocess.Process) -> AsyncIterator[Event]:
    assert process.stdout is not None
    async for line in process.stdout:
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if isinstance(event, dict):
            yield event
        else:
            sys.stderr.write(line.decode(errors="replace"))
