"""The loop of every supervisor: start the children, watch them, answer probes, and end with a status that says how.

0: it was asked to end, and has. 1: a death, 3: a wedge; both with evidence. What a service has of its own, which
children it has, how they are started, which death caused others and how it is asked to end, is a `Workload` and an
`Ending`.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sluice_protocol.service_spec import HealthSpec
from sluice_runtime.descriptors import raise_limit
from sluice_runtime.errors import SpecError
from sluice_runtime.health.guard import Guard
from sluice_runtime.health.reading import Exit
from sluice_runtime.health.verdict import Verdict
from sluice_runtime.process.children import ChildDied, Children
from sluice_runtime.process.outlet import heard_or_not
from sluice_runtime.process.processes import die_with_parent, say
from sluice_runtime.process.supervision import announce, failed_start, leave_message, sole_user

# The arguments, the spec, or what it names cannot be served: no process has died.
EXIT_REFUSED = 2
# One death brings others about: so long the last words of all are waited for before one of them is blamed.
SETTLE_S = 0.5
CAUSE_S = 3.0


class Refused(Exception):
    """A child has refused its arguments, and has said why: no incident."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a service is asked to end: `process` gets SIGTERM, and must have ended within `within_s` seconds, or is
    wedged in `row`."""

    process: str
    row: str
    within_s: float


class Workload(Protocol):
    """The children of one service, as their supervisor needs them."""

    def prepare(self) -> None:
        """What the children need before any is started. Raises OSError where there is no room for it."""

    def lives(self) -> Sequence[Coroutine[Any, Any, None]]:
        """The whole life of each child, its start included, which can fail and hang as anything else can. Raises
        ChildDied, or Refused, at an end that was not asked for; it returns after one that was."""

    def exit_of(self, process: str, status: int | None) -> Exit:
        """Its end, with what it has said of it itself. Raises Refused where that was no death."""

    def first_cause(self, exits: list[Exit]) -> list[Exit]:
        """Of deaths that came together, the one that brought the others about comes first."""

    def asked_to_end(self) -> None:
        """The child that ends for all is about to be asked."""

    def release(self) -> None:
        """What `prepare` has taken, once all children are gone. Also called where that has failed."""


class Supervisor:
    """Use once. `host`, `probe_port`: where the probes answer; 0: the system picks a port."""

    def __init__(
        self, guard: Guard, children: Children, workload: Workload, ending: Ending, host: str, probe_port: int
    ) -> None:
        self.guard, self.children, self.workload = guard, children, workload
        self._ending = ending
        self._host, self._probe_port = host, probe_port

    async def run(self) -> int:
        """The exit status."""
        guard, loop = self.guard, asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, guard.stopping.set)
        tasks: list[asyncio.Task[Any]] = []
        try:
            try:
                self.workload.prepare()
                await guard.start(self._host, self._probe_port)
            except OSError as error:
                return await end_by(guard, failed_start(error))
            announce(guard, self._host)
            try:
                verdict = await self._judge(tasks)
            except Refused:
                return EXIT_REFUSED
            except Exception as error:
                verdict = guard.failed(error)
            if verdict is None:
                say("stopped")
                return 0
            return await end_by(guard, verdict)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.children.kill_all()
            await guard.stop()
            self.workload.release()

    async def _judge(self, tasks: list[asyncio.Task[Any]]) -> Verdict | None:
        """After a wish to stop, the first death, or a verdict. Raises whatever ended the watch or a life. `tasks` gets
        what goes on."""
        loop = asyncio.get_running_loop()
        watching = loop.create_task(self.guard.run())
        lives = [loop.create_task(life) for life in self.workload.lives()]
        tasks += [watching, *lives, loop.create_task(self.guard.stopping.wait())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if self.guard.stopping.is_set():
            return await self._drain(watching, lives)
        return watching.result() if watching.done() else await self._fatal(watching, lives)

    async def _drain(self, watching: asyncio.Task[Verdict], lives: list[asyncio.Task[None]]) -> Verdict | None:
        """None: it has finished what it had. A service that dies or freezes meanwhile is told of as ever."""
        ending = self._ending
        self.guard.drain(ending.row, ending.within_s)
        self.workload.asked_to_end()
        process = self.children.get(ending.process)
        if process is None or await ends_as_asked(process, watching):
            return None
        if watching.done():
            return watching.result()
        await asyncio.wait(lives, timeout=SETTLE_S, return_when=asyncio.ALL_COMPLETED)
        return self._verdict_on([self.workload.exit_of(ending.process, process.returncode)], watching)

    async def _fatal(self, watching: asyncio.Task[Verdict], lives: list[asyncio.Task[None]]) -> Verdict:
        """A verdict on the first death. Raises what was no death, but a refusal or a defect of ours."""
        await asyncio.wait(lives, timeout=SETTLE_S, return_when=asyncio.ALL_COMPLETED)
        clock = asyncio.get_running_loop().time
        deadline = clock() + CAUSE_S
        while (errors := errors_of(lives)) and all(has_followed(error) for error in errors):
            # The process that it followed has not been reaped yet.
            rest, left = [life for life in lives if not life.done()], deadline - clock()
            if not rest or left <= 0:
                break
            await asyncio.wait(rest, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        return self._verdict_on(exits_of(errors), watching)

    def _verdict_on(self, exits: list[Exit], watching: asyncio.Task[Verdict]) -> Verdict:
        for gone in self.workload.first_cause(exits):
            self.guard.exited(self.children.with_last_words(gone))
        watching.cancel()
        return self.guard.watch.look()


def errors_of(lives: list[asyncio.Task[None]]) -> list[BaseException]:
    return [error for life in lives if life.done() and (error := life.exception()) is not None]


def has_followed(error: BaseException) -> bool:
    """A process that ended with 0 did so because another one had gone."""
    return isinstance(error, ChildDied) and error.exit.status == 0


def exits_of(errors: list[BaseException]) -> list[Exit]:
    """Raises what is no death."""
    for error in errors:
        if not isinstance(error, ChildDied):
            raise error
    return [error.exit for error in errors if isinstance(error, ChildDied)]


async def ends_as_asked(process: asyncio.subprocess.Process, watching: asyncio.Task[Verdict]) -> bool:
    """Asks a child to end, and waits for that or for a verdict. False: there is one, or it ended with another
    status."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    ended = asyncio.get_running_loop().create_task(process.wait())
    await asyncio.wait({ended, watching}, return_when=asyncio.FIRST_COMPLETED)
    ended.cancel()
    # It may not yet have had a handler for our signal.
    return not watching.done() and process.returncode in (0, -signal.SIGTERM)


async def end_by(guard: Guard, verdict: Verdict) -> int:
    """Evidence and the one line, for a person and for the process that started this one: the exit status."""
    status = await guard.close(verdict)
    say("died", cause=str(verdict))
    return status


async def undisturbed(running: Awaitable[int]) -> int:
    """The exit status of a supervisor, which its end decides: a signal that comes after it must not replace it."""
    try:
        return await running
    finally:
        # The loop would give them back to the system's default, which is to end the process at once.
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)


# -- the process -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Planned:
    """A supervisor that is yet to be made, within its loop. `health`, `run_dir`: where it leaves its message should it
    fail before or beside its guard."""

    health: HealthSpec
    run_dir: Path
    make: Callable[[], Supervisor]


def run_process(plan: Callable[[], Planned], parent: int, *refusals: type[Exception]) -> int:
    """The whole life of a supervisor's process: its exit status. `parent`: the process whose end is ours; 0: none.
    `refusals`: beside SpecError, what `plan` and `Planned.make` raise where the service cannot be served as it is asked
    for."""
    if parent:
        die_with_parent(parent, signal.SIGTERM)
    raise_limit()
    refused: tuple[type[Exception], ...] = (SpecError, *refusals)
    with heard_or_not():
        try:
            planned = plan()
            with sole_user(planned.run_dir):
                return asyncio.run(undisturbed(_run(planned, refused)))
        except Exception as error:
            say("died", cause=f"{type(error).__name__}: {error}")
            return EXIT_REFUSED if isinstance(error, refused) else 1


async def _run(planned: Planned, refused: tuple[type[Exception], ...]) -> int:
    try:
        return await planned.make().run()
    except refused:
        raise
    except Exception as error:  # none is known that comes so far; without a message it would go unseen
        leave_message(planned.health, planned.run_dir, error)
        raise
