"""What every supervisor does beside its loop and its guard: its settings, how it announces itself, the lock on its run
directory, and the message that is left where all else has failed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from sluice_protocol.service_spec import HealthSpec
from sluice_runtime.address import join
from sluice_runtime.errors import SpecError
from sluice_runtime.health.evidence import EvidenceLimits
from sluice_runtime.health.guard import MAX_MESSAGE_BYTES, TERMINATION, Guard, Policy, write_now
from sluice_runtime.health.incidents import QuarantinePolicy
from sluice_runtime.health.verdict import Budgets, Kind, Verdict
from sluice_runtime.health.watched import Reason
from sluice_runtime.process.processes import say


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
    """Print where this supervisor answers, for the process that started it."""
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
