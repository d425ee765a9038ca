"""What the supervisors of engines and of gateways have in common beside the guard: their settings, how they announce
themselves, and how they listen to a child."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

from sluice_protocol.service_spec import HealthSpec
from sluice_runtime.address import join
from sluice_runtime.errors import SpecError
from sluice_runtime.health.evidence import EvidenceLimits
from sluice_runtime.health.guard import MAX_MESSAGE_BYTES, TERMINATION, Guard, Policy, write_now
from sluice_runtime.health.incidents import QuarantinePolicy
from sluice_runtime.health.verdict import Budgets, Kind, Verdict
from sluice_runtime.health.watched import Reason
from sluice_runtime.process.processes import json_lines, say


def policy_of(health: HealthSpec) -> Policy:
    return Policy(
        Budgets(health.floor_s, health.factor, health.start_s),
        QuarantinePolicy(health.quarantine_after, health.quarantine_window_s, health.quarantine_s),
        EvidenceLimits(health.max_bundles, health.max_bundle_mib << 20),
        Path(health.evidence_dir) if health.evidence_dir else None,
        Path(health.termination_path) if health.termination_path else None,
        health.debug_port,
    )


def probe_url(guard: Guard, host: str) -> str:
    return f"http://{join(host, guard.probe_port)}"


def announce(guard: Guard, host: str) -> None:
    """Where this supervisor answers, for whoever started it."""
    say(
        "supervising",
        pid=os.getpid(),
        name=guard.service.name,
        role=guard.service.role,
        run_dir=str(guard.service.run_dir),
        probes=probe_url(guard, host),
        debug=f"http://127.0.0.1:{guard.debug_port}",
    )


def ports_of(*addresses: object) -> list[int]:
    """Of `host:port` or URLs; an empty one has none."""
    return [int(str(address).rpartition(":")[2].strip("/")) for address in addresses if address]


def failed_start(error: OSError) -> Verdict:
    """Of the supervisor itself: it has no memory for its children, or no place to answer probes."""
    detail = f"{type(error).__name__}: {error}"
    return Verdict(Kind.DEAD, Reason.START_FAILED, "supervisor", "starting", detail=detail)


_Verdict = TypeVar("_Verdict", bound=Verdict | None)


async def named(guard: Guard, judging: Awaitable[_Verdict]) -> _Verdict | Verdict:
    """The verdict, also on a supervisor that fails while it watches or judges."""
    try:
        return await judging
    except Exception as error:
        return guard.failed(error)


def leave_message(health: HealthSpec, run_dir: Path, error: Exception) -> None:
    """The last that can be done for a supervisor that fails outside its guard."""
    traceback.print_exception(error, file=sys.stderr)
    detail = f"{type(error).__name__}: {' '.join(str(error).split())}"
    verdict = Verdict(Kind.DEAD, Reason.SUPERVISOR_FAILED, "supervisor", detail=detail)
    path = Path(health.termination_path) if health.termination_path else run_dir / TERMINATION
    with contextlib.suppress(OSError):
        write_now(path, f"{verdict}; no evidence\n".encode(errors="replace")[:MAX_MESSAGE_BYTES])


@contextlib.contextmanager
def sole_user(run_dir: Path) -> Iterator[None]:
    """Raises SpecError where another supervisor lives in that directory: its recorder, sockets and stacks are there.
    The lock ends with this process, however that ends."""
    fd = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SpecError(
                f"run_dir: {run_dir} is another supervisor's that still runs: name one per service"
            ) from error
        except OSError:  # a filesystem without locks
            pass
        yield
    finally:
        os.close(fd)


async def end_by(guard: Guard, verdict: Verdict) -> int:
    """Evidence and the one line, for a person and for whoever started this: the exit status."""
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
