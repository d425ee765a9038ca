"""The processes that one supervisor has started: their stdout and stderr, their pids, their last words, their end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from sluice_protocol.service_spec import LogFormat
from sluice_runtime.health.last_words import cause_of_death, clean
from sluice_runtime.health.reading import Exit
from sluice_runtime.process.child_stderr import ChildStderr, passed_on
from sluice_runtime.process.processes import MAX_EVENT_BYTES, child_environment, json_lines


class ChildDied(Exception):
    """`process`: as the recorder's rows call it. `status` None: not known, or it has never begun."""

    def __init__(self, process: str, status: int | None, reason: str = "", detail: str = "") -> None:
        super().__init__(f"{process} ended with {status}{': ' if detail else ''}{detail}")
        self.exit = Exit(process, status, reason, detail)


@dataclass(frozen=True, slots=True)
class StderrTerms:
    """What is known of the stderr of a service's processes.

    `secrets`: never told. `hold_prompts`: processes whose lines may quote a request. `inherited`: the process whose
    stderr is also that of the processes it forks. `has_reason`: processes that tell their reason there alone, so that
    it is added to what they report otherwise.
    """

    secrets: tuple[str, ...] = ()
    hold_prompts: frozenset[str] = frozenset()
    inherited: str = ""
    has_reason: frozenset[str] = frozenset()


class Children:
    """Of the service `service`; what they say goes on in `log_format`. A name has one process at a time."""

    def __init__(self, service: str, log_format: LogFormat, terms: StderrTerms) -> None:
        self._service, self._log_format, self._terms = service, log_format, terms
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._stderr: dict[str, ChildStderr] = {}
        self._hearing: list[asyncio.Task[None]] = []
        self._adopted: dict[str, int] = {}
        self._adopted_fds: list[int] = []

    # -- starting --------------------------------------------------------------------------------------------------

    async def start(self, name: str, *argv: str, pass_fds: tuple[int, ...] = ()) -> asyncio.subprocess.Process:
        """`argv`: after the interpreter. Raises ChildDied also when the system has no room for another process."""
        try:
            stderr = self._listen_to(name)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *argv,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr.child_fd,
                limit=MAX_EVENT_BYTES,
                pass_fds=pass_fds,
                env=child_environment(),
            )
        except OSError as error:
            raise ChildDied(name, None, type(error).__name__, str(error)) from error
        stderr.given()
        self._processes[name] = process
        return process

    def _listen_to(self, name: str) -> ChildStderr:
        """What the life before this one said is passed on first. Raises OSError."""
        if name in self._stderr:
            self._stderr.pop(name).close()
        stderr = self._stderr[name] = ChildStderr(self._said_by(name))
        return stderr

    def adopt(self, name: str, pid: int) -> None:
        """Another child's child, which is not ours to wait for; by its pidfd it can be ended also while that child is
        stuck."""
        self._adopted[name] = pid
        with contextlib.suppress(ProcessLookupError):
            self._adopted_fds.append(os.pidfd_open(pid))

    def disown(self, name: str) -> None:
        """It has ended."""
        self._adopted.pop(name, None)

    # -- hearing ---------------------------------------------------------------------------------------------------

    def events(self, name: str) -> AsyncIterator[dict[str, object]]:
        """What it prints, to the end of its stdout. Another call goes on where the last one was left."""
        return child_events(self._processes[name], self._said_by(name))

    async def hear(self, name: str) -> None:
        """Stdout of one that has no more to tell us, to its end: native code may print there, and must not be held up.
        That of the processes that it forks goes there too."""
        said = self._said_by(name)
        async for event in self.events(name):
            said(json.dumps(event).encode() + b"\n")

    def hear_meanwhile(self, name: str) -> None:
        """`hear`, until the end of all."""
        self._hearing.append(asyncio.get_running_loop().create_task(self.hear(name)))

    def _said_by(self, name: str) -> Callable[[bytes], None]:
        return passed_on(self._log_format, self._service, name)

    # -- knowing ---------------------------------------------------------------------------------------------------

    def get(self, name: str) -> asyncio.subprocess.Process | None:
        """The last that was started by that name."""
        return self._processes.get(name)

    def pids(self) -> dict[str, int]:
        """Of what lives now."""
        told = {name: process.pid for name, process in self._processes.items() if process.returncode is None}
        return told | self._adopted

    def about(self) -> dict[str, dict[str, object]]:
        """For a bundle, by process: `pid`, `status`, and the last lines of `stderr` where there are any."""
        told: dict[str, dict[str, object]] = {
            name: {"pid": process.pid, "status": process.returncode} for name, process in self._processes.items()
        }
        for name, stderr in self._stderr.items():
            if lines := stderr.tail():
                told.setdefault(name, {})["stderr"] = [clean(line, self._terms.secrets) for line in lines]
        return told | {name: {"pid": pid} for name, pid in self._adopted.items()}

    def with_last_words(self, gone: Exit) -> Exit:
        """A death whose process has given no detail gets what its stderr says."""
        stderr = self._stderr.get(gone.process) or self._stderr.get(self._terms.inherited)
        if stderr is None or (gone.detail and gone.process not in self._terms.has_reason):
            return gone
        stderr.close()
        holds_prompts = gone.process in self._terms.hold_prompts
        words = cause_of_death(stderr.tail(), self._terms.secrets, holds_prompts=holds_prompts)
        if not words or words in gone.detail:
            return gone
        return replace(gone, detail=f"{gone.detail}; its stderr: {words}" if gone.detail else words)

    # -- the end ---------------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        process = self._processes.get(name)
        if process is not None and process.returncode is None:
            process.kill()

    async def kill_all(self) -> None:
        """Afterwards none is left, and what they said last has been passed on."""
        for fd in self._adopted_fds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            os.close(fd)
        self._adopted_fds.clear()
        for name in self._processes:
            self.kill(name)
        for process in self._processes.values():
            await process.wait()
        await asyncio.gather(*self._hearing)
        for stderr in self._stderr.values():
            stderr.close()


async def child_events(
    process: asyncio.subprocess.Process, said: Callable[[bytes], None]
) -> AsyncIterator[dict[str, object]]:
    """JSON lines of a child; `said` gets anything else that it prints."""
    assert process.stdout is not None
    async for event in json_lines(process.stdout, said):
        if "event" in event:
            yield event
        else:
            said(json.dumps(event).encode() + b"\n")
