"""A supervisor's health part over real HTTP: endpoints, readiness, and the way from a verdict to an exit status."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from pathlib import Path

import pytest

from sluice_engine.supervisor.engine_kind import engine_kind
from sluice_engine.supervisor.engine_metrics import ENGINE_METRICS
from sluice_protocol.generate import Role
from sluice_runtime.health import evidence, guard
from sluice_runtime.health.evidence import EvidenceLimits
from sluice_runtime.health.exposition import HEALTH_METRICS
from sluice_runtime.health.guard import EXIT_DEAD, EXIT_WEDGED, Guard, Policy
from sluice_runtime.health.incidents import QuarantinePolicy
from sluice_runtime.health.layout import Phase, Readiness
from sluice_runtime.health.reading import Exit
from sluice_runtime.health.service import Service
from sluice_runtime.health.verdict import Budgets, Kind, Verdict
from sluice_runtime.health.watched import Reason

pytestmark = pytest.mark.slow

WEDGE = Verdict(Kind.WEDGED, "DeviceStuck", "rank0.device", "device", 31.0, 30.0, 4)


async def ask(port: int, path: str, method: str = "GET", head: str = "Host: localhost") -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n\r\n".encode())
    head, _, body = (await asyncio.wait_for(reader.read(), 10)).decode().partition("\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body


class Scene:
    """A guard over rows that this process writes itself."""

    def __init__(self, tmp_path: Path, **policy: object) -> None:
        kind = engine_kind(Role.UNIFIED, "nixl")
        service = Service("unified-0", "unified", tmp_path, kind, lambda: {"leader": os.getpid()}, lambda: {"k": 1})
        told = {"budgets": Budgets(floor_s=1.0), "quarantine": QuarantinePolicy(hold_s=0)} | policy
        self.guard = Guard(service, Policy(**told))  # type: ignore[arg-type]
        self.rows = {row.name: self.guard.recorder.row(row.name) for row in kind.watched}
        self.frozen: set[str] = set()

    async def tick(self) -> None:
        for row in self.rows.values():
            row.begin(Phase.SERVING)
        while True:
            for name, row in self.rows.items():
                if name not in self.frozen:
                    row.tick()
            await asyncio.sleep(0.05)


@pytest.fixture(autouse=True)
def _no_process_here_answers_with_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "STACKS_S", 0.1)


@pytest.fixture
async def scene(tmp_path: Path):
    scene = Scene(tmp_path)
    async with running(scene):
        yield scene


@contextlib.asynccontextmanager
async def running(scene: Scene):
    await scene.guard.start("127.0.0.1")
    ticking = asyncio.create_task(scene.tick())
    try:
        yield
    finally:
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)
        await scene.guard.stop()


async def quarantine(scene: Scene, closing: asyncio.Task[int]) -> None:
    while not scene.guard.quarantined:
        assert not closing.done()
        await asyncio.sleep(0.01)


async def statuses(scene: Scene) -> dict[str, int]:
    port = scene.guard.probe_port
    return {path: (await ask(port, path))[0] for path in ("/livez", "/readyz", "/startupz", "/health")}


@pytest.mark.parametrize(
    "head",
    [
        "Host: evil.example",
        "Host: evil.example:80",
        "Host: [evil",
        "Host: 127.0.0.1\r\nOrigin: http://evil.example",
        "Host: localhost\r\nOrigin: null",
    ],
)
async def test_the_debug_port_answers_no_page_of_another_machine(scene: Scene, head: str) -> None:
    """A name of somebody's own may resolve to 127.0.0.1: the browser then takes us for him."""
    for method, path in (("GET", "/debug/stacks"), ("POST", "/debug/maintenance?seconds=60")):
        status, body = await ask(scene.guard.debug_port, path, method, head)
        assert status == 403, body
    assert scene.guard.watch.maintenance_s == 0
    assert (await ask(scene.guard.probe_port, "/livez", head=head))[0] == 200


@pytest.mark.parametrize("head", ["Host: 127.0.0.1:9", "Host: [::1]:9", "Host: LOCALHOST", "X-Nothing: 1"])
async def test_the_debug_port_answers_this_machine(scene: Scene, head: str) -> None:
    assert (await ask(scene.guard.debug_port, "/debug/verdict", head=head))[0] == 200


async def test_a_pipe_as_termination_path_does_not_hold_up_the_end(tmp_path: Path, capfd) -> None:
    path = tmp_path / "log"
    os.mkfifo(path)
    scene = Scene(tmp_path, termination_path=path)
    async with running(scene):
        assert await asyncio.wait_for(scene.guard.close(WEDGE), 30) == EXIT_WEDGED
    assert str(WEDGE) in capfd.readouterr().err


async def test_each_probe_says_what_it_is_for(scene: Scene) -> None:
    guard = scene.guard
    guard.watch.look()
    assert await statuses(scene) == {"/livez": 200, "/readyz": 503, "/startupz": 503, "/health": 200}
    assert guard.recorder.readiness is Readiness.STARTING
    guard.started()
    assert await statuses(scene) == {"/livez": 200, "/readyz": 200, "/startupz": 200, "/health": 200}
    assert guard.recorder.readiness is Readiness.READY
    guard.drain()
    assert await statuses(scene) == {"/livez": 200, "/readyz": 503, "/startupz": 200, "/health": 200}
    assert guard.recorder.readiness is Readiness.NOT_READY


async def test_a_drain_that_is_not_done_in_time_is_named_though_everything_turns(scene: Scene) -> None:
    scene.guard.started()
    scene.guard.drain("leader.loop", 0.5)
    verdict = await asyncio.wait_for(scene.guard.run(), 20)
    assert (verdict.kind, verdict.reason, verdict.culprit) == (Kind.WEDGED, Reason.DRAIN_STALLED, "leader.loop")


async def test_a_drain_that_is_done_in_time_is_the_end_of_it(scene: Scene) -> None:
    guard = scene.guard
    guard.started()
    guard.drain("leader.loop", 0.3)
    guard.drained()
    looking = asyncio.create_task(guard.run())
    await asyncio.sleep(1.0)
    assert not looking.done()
    assert await statuses(scene) == {"/livez": 200, "/readyz": 503, "/startupz": 200, "/health": 200}
    # What comes after it, an end that was asked for, has a time of its own.
    guard.drain("leader.loop", 0.1)
    assert (await asyncio.wait_for(looking, 20)).reason is Reason.DRAIN_STALLED


async def test_a_drain_waits_for_a_step_that_is_only_slow(scene: Scene) -> None:
    row = scene.rows["leader.loop"]
    row.expect(int(1e9))
    row.pending(1)
    scene.guard.started()
    scene.guard.drain("leader.loop", 0.1)
    looking = asyncio.create_task(scene.guard.run())
    await asyncio.sleep(1.0)
    assert not looking.done()
    row.pending(0)
    assert (await asyncio.wait_for(looking, 20)).reason is Reason.DRAIN_STALLED


async def test_a_wedge_is_named_by_every_answer(scene: Scene) -> None:
    scene.guard.started()
    looking = asyncio.create_task(scene.guard.run())
    scene.frozen.add("leader.loop")
    verdict = await asyncio.wait_for(looking, 20)
    assert (verdict.reason, verdict.culprit) == (Reason.EVENT_LOOP_BLOCKED, "leader.loop")
    assert await statuses(scene) == {"/livez": 503, "/readyz": 503, "/startupz": 503, "/health": 503}
    told = json.loads((await ask(scene.guard.probe_port, "/health"))[1])
    assert (told["verdict"], told["reason"], told["culprit"]) == ("wedged", "EventLoopBlocked", "leader.loop")
    assert told["age_s"] > told["budget_s"] == 1.0


async def test_closing_keeps_evidence_says_why_and_stays_live_meanwhile(
    scene: Scene, tmp_path: Path, capsys, monkeypatch
) -> None:
    scene.guard.started()
    asked = threading.Event()
    monkeypatch.setattr(guard.fault_points, "reach", lambda point: asked.wait(30))
    closing = asyncio.create_task(scene.guard.close(WEDGE))
    await asyncio.sleep(0)
    assert await statuses(scene) == {"/livez": 200, "/readyz": 503, "/startupz": 503, "/health": 200}
    asked.set()
    assert await asyncio.wait_for(closing, 30) == EXIT_WEDGED
    message = (tmp_path / "termination-log").read_text()
    assert message.startswith("Wedged: DeviceStuck: rank0.device was device for 31.0 s")
    bundle = tmp_path / "evidence" / "incident-0001-DeviceStuck"
    assert str(bundle) in message
    assert {path.name for path in bundle.iterdir()} >= {"recorder.bin", "verdict.json", "leader.proc", "about.json"}
    said = [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()]
    assert said == ["incident", "evidence"]


async def test_a_death_exits_with_one(scene: Scene) -> None:
    scene.guard.exited(Exit("rank0", -9))
    verdict = await asyncio.wait_for(scene.guard.run(), 10)
    assert await scene.guard.close(verdict) == EXIT_DEAD


async def test_without_a_place_for_evidence_it_ends_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file where the folder should be")
    scene = Scene(tmp_path, evidence_dir=tmp_path / "taken", termination_path=tmp_path / "taken" / "log")
    async with running(scene):
        assert await asyncio.wait_for(scene.guard.close(WEDGE), 30) == EXIT_WEDGED


async def test_after_too_many_incidents_it_stays_up_and_out_of_service_for_a_bounded_time(tmp_path: Path) -> None:
    policy = QuarantinePolicy(incidents=2, window_s=600, hold_s=1.0)
    for expected in (False, True):
        scene = Scene(tmp_path, quarantine=policy, limits=EvidenceLimits(bundles=1))
        async with running(scene):
            closing = asyncio.create_task(scene.guard.close(WEDGE))
            if expected:
                await quarantine(scene, closing)
                assert await statuses(scene) == {"/livez": 200, "/readyz": 503, "/startupz": 503, "/health": 200}
                assert scene.guard.recorder.readiness is Readiness.QUARANTINED
            assert await asyncio.wait_for(closing, 30) == EXIT_WEDGED
            assert scene.guard.quarantined is expected


async def test_a_wish_to_stop_ends_quarantine(tmp_path: Path) -> None:
    scene = Scene(tmp_path, quarantine=QuarantinePolicy(incidents=1, hold_s=3600))
    async with running(scene):
        closing = asyncio.create_task(scene.guard.close(WEDGE))
        await quarantine(scene, closing)
        scene.guard.stopping.set()
        assert await asyncio.wait_for(closing, 10) == EXIT_WEDGED


async def test_the_debug_port_tells_rows_mirrors_stacks_and_takes_a_window(scene: Scene) -> None:
    guard = scene.guard
    guard.watch.look()
    guard.recorder.step_sent(5, b"frame", b"c" * 16, 3, 2, 1)
    for path in ("verdict", "rows", "ledger", "leases", "transfers", "steps", "events", "stacks"):
        status, body = await ask(guard.debug_port, f"/debug/{path}")
        assert status == 200, (path, body)
        assert (await ask(guard.probe_port, f"/debug/{path}"))[0] == 404
    assert json.loads((await ask(guard.debug_port, "/debug/steps"))[1])[0]["number"] == 5
    status, body = await ask(guard.debug_port, "/debug/maintenance?seconds=50", "POST")
    assert (status, json.loads(body)) == (200, {"maintenance_s": 50.0})
    status, body = await ask(guard.debug_port, "/debug/maintenance", "POST")
    assert status == 400
    assert "seconds" in body
    assert (await ask(guard.debug_port, "/debug/maintenance?seconds=50"))[0] == 405


async def test_metrics_are_all_exported_by_the_names_of_the_table(scene: Scene) -> None:
    scene.guard.watch.look()
    status, body = await ask(scene.guard.probe_port, "/metrics")
    assert status == 200
    assert 'sluice_verdict{role="unified",service="unified-0",verdict="idle"} 1.0' in body
    for spec in (*HEALTH_METRICS, *ENGINE_METRICS):
        assert f"# HELP {spec.name}" in body


async def test_a_probe_that_is_no_http_or_never_ends_holds_up_nobody(scene: Scene) -> None:
    port = scene.guard.probe_port
    scene.guard.watch.look()
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
    _, garbage = await asyncio.open_connection("127.0.0.1", port)
    garbage.write(b"\x00\xff" * 5000 + b"\r\n\r\n")
    assert (await ask(port, "/livez"))[0] == 200
    for _, writer in silent:
        writer.close()
    garbage.close()


async def test_a_filesystem_that_hangs_holds_up_neither_the_probes_nor_the_end(tmp_path: Path, monkeypatch) -> None:
    """A pipe without a writer, where the list of incidents should be: reading it takes for ever."""
    monkeypatch.setattr(guard, "NOTE_S", 1.0)
    (tmp_path / "evidence").mkdir()
    os.mkfifo(tmp_path / "evidence" / "incidents.jsonl")
    scene = Scene(tmp_path)
    async with running(scene):
        closing = asyncio.create_task(scene.guard.close(WEDGE))
        while not (tmp_path / "termination-log").exists():
            assert not closing.done()
            await asyncio.sleep(0.01)
        assert (await asyncio.wait_for(ask(scene.guard.probe_port, "/livez"), 10))[0] == 200
        assert await asyncio.wait_for(closing, 30) == EXIT_WEDGED


async def test_nobody_new_is_sent_while_a_process_is_away_longer_than_a_moment(scene: Scene, monkeypatch) -> None:
    monkeypatch.setattr(guard, "AWAY_S", 0.5)
    scene.guard.started()
    looking = asyncio.create_task(scene.guard.run())
    await asyncio.sleep(0)
    scene.guard.forget("leader")  # any process will do
    assert (await ask(scene.guard.probe_port, "/readyz"))[0] == 200
    while scene.guard.is_ready:
        assert not looking.done()
        await asyncio.sleep(0.01)
    assert (await ask(scene.guard.probe_port, "/readyz"))[0] == 503
    assert (await ask(scene.guard.probe_port, "/livez"))[0] == 200
    scene.rows["leader.loop"].begin(Phase.SERVING)
    while not scene.guard.is_ready:
        assert not looking.done()
        await asyncio.sleep(0.01)
    looking.cancel()
