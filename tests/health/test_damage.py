"""A recorder that somebody has written over, or cut: every child maps it, and one stray store is enough. The supervisor
goes on where that is harmless, and names its own end where it is not."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sluice_engine.leader.marks import LeaderMarks
from sluice_engine.supervisor import supervise
from sluice_gateway import supervised
from sluice_gateway.status.watched_rows import GATEWAY_KIND, GATEWAY_MIRROR, GATEWAY_ROWS, GatewayReason
from sluice_launch.process import stop_process
from sluice_protocol.engine_spec import EngineSpec
from sluice_protocol.generate import Role
from sluice_protocol.service_spec import HealthSpec
from sluice_runtime.health import evidence
from sluice_runtime.health.guard import EXIT_DEAD, EXIT_WEDGED, Guard, Policy, Service
from sluice_runtime.health.incidents import QuarantinePolicy, read_incidents
from sluice_runtime.health.layout import WORD, Field, Header, Phase, Readiness, mirror_at, row_at
from sluice_runtime.health.reading import Copy
from sluice_runtime.health.recorder import Recorder
from sluice_runtime.health.verdict import Kind, Verdict
from sluice_runtime.process.supervisor import Supervisor

ALL_ONES = (1 << 64) - 1


@pytest.fixture(autouse=True)
def _no_process_here_answers_with_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "STACKS_S", 0.1)


def overwrite(path: Path, at: int, value: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(struct.pack("<Q", value))


def make_guard(run_dir: Path) -> Guard:
    service = Service("gateway", "gateway", run_dir, GATEWAY_KIND, dict, lambda: {"k": 1})
    guard = Guard(service, Policy(quarantine=QuarantinePolicy(hold_s=0)))
    for row in GATEWAY_ROWS:
        guard.recorder.row(row.name).begin(Phase.IDLE)
    return guard


async def test_a_readiness_word_that_is_none_is_put_right_and_read_as_not_ready(tmp_path: Path) -> None:
    guard = make_guard(tmp_path)
    guard.started()
    marks = LeaderMarks(None)
    marks.recorder = Recorder.attach(guard.recorder.path)
    watching = asyncio.create_task(guard.run())
    assert marks.readiness is Readiness.READY
    for stray in (77, Readiness.QUARANTINED):
        overwrite(guard.recorder.path, Header.READINESS * WORD, stray)
        assert marks.readiness is (Readiness.NOT_READY if stray == 77 else Readiness.QUARANTINED)
        async with asyncio.timeout(10):
            while marks.readiness is not Readiness.READY:  # noqa: ASYNC110 - a file that another task writes
                await asyncio.sleep(0.02)
    assert guard.is_ready
    assert not watching.done()
    watching.cancel()


def test_numbers_that_are_full_end_no_thread(tmp_path: Path) -> None:
    """A process that is started again reads what the one before it left."""
    recorder = make_guard(tmp_path).recorder
    overwrite(recorder.path, row_at(0) + 32 + Field.TICKS * WORD, ALL_ONES)
    overwrite(recorder.path, mirror_at(0), ALL_ONES)
    attached = Recorder.attach(recorder.path)
    row = attached.row(GATEWAY_ROWS[0].name)
    row.tick()
    row.tick()
    attached.mirror(GATEWAY_MIRROR, {"a": 1})
    attached.mirror(GATEWAY_MIRROR, {"a": 2})
    assert Copy(recorder.view).mirror(GATEWAY_MIRROR).value == {"a": 2}
    assert Copy(recorder.view).rows()[row.name].ticks == 1


# -- what the supervisor of a gateway does, and that of an engine ------------------------------------------------------


async def asleep(supervisor: Supervisor, name: str) -> None:
    """The life of a child that says nothing and does not end."""
    await (await supervisor.children.start(name, "-c", "import time; time.sleep(60)")).wait()


def gateway_run(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    health = HealthSpec(quarantine_s=0)
    supervisor = supervised.gateway_supervisor(supervised.GatewaySpec("gateway", run_dir, (), health))
    monkeypatch.setattr(supervisor.workload, "lives", lambda: [asleep(supervisor, "gateway")])
    return supervisor


def engine_run(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    monkeypatch.setattr(supervise, "resolve", lambda spec: SimpleNamespace(layouts=None, pools=None, facts={}))
    monkeypatch.setattr(supervise, "create_memory", lambda *_: os.memfd_create("pools"))
    health = HealthSpec(quarantine_s=0)
    spec = EngineSpec(role=Role.UNIFIED, name="u", run_dir=str(run_dir), health=health)
    supervisor = supervise.engine_supervisor(spec, run_dir / "spec.json", "")
    monkeypatch.setattr(supervisor.workload, "lives", lambda: [asleep(supervisor, "leader")])
    return supervisor


Run = Callable[[], Supervisor]


@pytest.fixture(params=["gateway", "engine"])
def make_run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return lambda: (gateway_run if request.param == "gateway" else engine_run)(tmp_path, monkeypatch)


async def begun(make_run: Run) -> tuple[Guard, asyncio.Task[Any]]:
    """A supervisor that has its processes, and its end."""
    supervisor = make_run()
    guard, running = supervisor.guard, asyncio.create_task(supervisor.run())
    async with asyncio.timeout(30):
        while not guard.service.pids():  # noqa: ASYNC110 - of real processes
            await asyncio.sleep(0.02)
    return guard, running


def magic(path: Path) -> None:
    overwrite(path, Header.MAGIC * WORD, 5)


def row_name(path: Path) -> None:
    overwrite(path, row_at(0), ALL_ONES >> 1)


@pytest.mark.process
@pytest.mark.timeout(60)
@pytest.mark.parametrize("damage", [magic, row_name])
async def test_a_damaged_recorder_is_an_incident_of_the_supervisor(
    make_run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: Callable[[Path], None]
) -> None:
    guard, running = await begun(make_run)
    async with asyncio.timeout(30):
        damage(guard.recorder.path)
        assert await running == EXIT_DEAD
    message = (tmp_path / "termination-log").read_text()
    assert message.startswith("Dead: SupervisorFailed: supervisor (RecorderError: ")
    bundle = tmp_path / "evidence" / "incident-0001-SupervisorFailed"
    assert str(bundle) in message
    about = json.loads((bundle / "about.json").read_text())
    assert "Traceback" in about["traceback"]
    rows = Copy((bundle / "recorder.bin").read_bytes()).rows()
    assert {row.name for row in guard.service.kind.watched} == set(rows)
    out, err = capfd.readouterr()
    assert [json.loads(line)["event"] for line in out.splitlines()][1:] == ["incident", "evidence", "died"]
    assert "Traceback" in err
    assert not guard.service.pids()


@pytest.mark.process
@pytest.mark.timeout(60)
async def test_whatever_ends_the_watch_is_named_also_in_a_drain(
    make_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard, running = await begun(make_run)
    async with asyncio.timeout(30):

        def fail() -> None:
            raise ZeroDivisionError("division\nby zero")

        monkeypatch.setattr(guard.watch, "look", fail)
        for pid in guard.service.pids().values():
            stop_process(pid)  # it does not end in the drain
        guard.stopping.set()
        assert await running == EXIT_DEAD
    message = (tmp_path / "termination-log").read_text()
    assert message.startswith("Dead: SupervisorFailed: supervisor (ZeroDivisionError: division by zero)")


async def test_a_defect_in_what_listens_to_a_child_is_an_incident(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = engine_run(tmp_path, monkeypatch)

    async def broken() -> None:
        raise KeyError("address")

    monkeypatch.setattr(supervisor.workload, "lives", lambda: [broken()])
    assert await asyncio.wait_for(supervisor.run(), 30) == EXIT_DEAD
    assert (tmp_path / "termination-log").read_text().startswith("Dead: SupervisorFailed: supervisor (KeyError: ")


async def test_evidence_that_cannot_be_told_is_left_out_and_the_end_comes_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = make_guard(tmp_path)
    guard.service.about = lambda: 1 // 0  # type: ignore[assignment,return-value]
    verdict = guard.failed(ValueError("x"))
    assert await asyncio.wait_for(guard.close(verdict), 30) == EXIT_DEAD
    assert "no evidence: ZeroDivisionError" in (tmp_path / "termination-log").read_text()


def no_thread(self: object) -> None:
    raise RuntimeError("can't start new thread")


async def test_at_the_limit_of_threads_evidence_and_message_are_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = make_guard(tmp_path)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    wedge = Verdict(Kind.WEDGED, "DeviceStuck", "rank0.device", "device", 31.0, 30.0, 4)
    assert await asyncio.wait_for(guard.close(wedge), 30) == EXIT_WEDGED
    bundle = tmp_path / "evidence" / "incident-0001-DeviceStuck"
    assert str(bundle) in (tmp_path / "termination-log").read_text()
    assert (bundle / "recorder.bin").exists()
    assert len(read_incidents(tmp_path / "evidence")) == 1


# -- no room -----------------------------------------------------------------------------------------------------------


@pytest.mark.process
async def test_without_room_for_a_recorder_the_start_has_failed_by_name(
    make_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    supervisor = make_run()
    assert await asyncio.wait_for(supervisor.run(), 30) == EXIT_DEAD
    message = (tmp_path / "termination-log").read_text()
    assert message.startswith("Dead: StartFailed: supervisor (OSError: [Errno 28]")
    assert not list(tmp_path.glob("*.new"))


async def test_a_gateway_that_cannot_be_started_is_an_incident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = supervised.gateway_supervisor(
        supervised.GatewaySpec("gateway", tmp_path, (), HealthSpec(quarantine_s=0))
    )

    async def no_room(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", no_room)
    assert await asyncio.wait_for(supervisor.run(), 30) == EXIT_DEAD
    message = (tmp_path / "termination-log").read_text()
    assert message.startswith("Dead: GatewayDead: gateway (BlockingIOError: [Errno 11]")


# -- cut ---------------------------------------------------------------------------------------------------------------

CUT = """
import asyncio, os, sys
from pathlib import Path
from sluice_runtime.health.guard import Guard, Policy
from sluice_runtime.health.service import Service
from sluice_runtime.health.layout import Phase
from sluice_runtime.health.reading import Exit
from sluice_gateway.status.watched_rows import GATEWAY_KIND, GATEWAY_ROWS

async def main():
    service = Service("gateway", "gateway", Path(sys.argv[1]), GATEWAY_KIND, dict, dict)
    guard = Guard(service, Policy())
    path = guard.recorder.path
    os.truncate(path, 4096)
    guard.exited(Exit("gateway", -7))  # its event is written far behind the cut
    assert path.stat().st_size == len(guard.recorder.view)
    os.truncate(path, 4096)
    verdict = await guard.run()
    os.truncate(path, 4096)
    print(verdict, await guard.close(verdict))

asyncio.run(main())
"""


@pytest.mark.process
@pytest.mark.timeout(60)
def test_a_recorder_that_is_cut_is_made_whole_and_who_died_of_it_is_named(tmp_path: Path) -> None:
    """To touch a page that its file no longer has is SIGBUS: the supervisor died of it too, and without a word."""
    done = subprocess.run([sys.executable, "-c", CUT, str(tmp_path)], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert "Dead: GatewayDead: gateway (ended with -7) 1" in done.stdout
    assert done.stdout.count('"recorder-cut"') == 3
    assert (tmp_path / "evidence" / "incident-0001-GatewayDead" / "recorder.bin").exists()
    assert GatewayReason.GATEWAY_DEAD in (tmp_path / "termination-log").read_text()
