"""The log of a service that `sluice up` runs is bounded while it runs: it may run for months."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from sluice_cli import stack
from sluice_gateway.routing.fleet import Member
from sluice_gateway.routing.members import read_fleet
from sluice_launch import kept, logs
from sluice_launch.commands import Command
from sluice_launch.kept import Service
from sluice_protocol.generate import Role

LIMIT = 20_000
# Says on stderr more than may be kept, in lines that tell their place, until it is ended.
TALKATIVE = """
import itertools, sys, time
for n in itertools.count():
    print(f"line {n:08d} {'x' * 80}", file=sys.stderr, flush=True)
    if n == 5:
        print("noise on stdout that is no event", flush=True)
    if n == 2000:
        print('{"event": "ready"}', flush=True)
    if n > 2000:
        time.sleep(0.001)
"""


@pytest.mark.timeout(60)
def test_the_log_of_a_service_that_talks_without_end_is_bounded(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(logs, "MAX_LOG_BYTES", LIMIT)
    monkeypatch.setattr(kept, "LOG_LOOK_S", 0.01)
    log = tmp_path / "talker.log"

    async def scenario() -> None:
        said: list[object] = []
        service = Service(
            Command("talker", ("-c", TALKATIVE)),
            log,
            said.append,
            lambda name, event: None,
            lambda *death: None,
        )
        service.begin()
        try:
            async with asyncio.timeout(30):
                await service.ready.wait()
                cuts, last = 0, 0
                for _ in range(3000):
                    await asyncio.sleep(0.01)
                    size = log.stat().st_size
                    cuts, last = cuts + (size < last), size
                    if cuts == 3:
                        break
        finally:
            await service.stop()
        assert cuts == 3
        assert log.with_suffix(".log.1").stat().st_size <= LIMIT

    asyncio.run(scenario())
    assert {path.name for path in tmp_path.iterdir()} == {"talker.log", "talker.log.1"}
    older, newer = (path.read_bytes() for path in (log.with_suffix(".log.1"), log))
    assert b"\0" not in older + newer  # a writer that kept its place in a file that was cut would leave a hole


def test_the_newest_of_a_log_that_is_too_long_is_kept(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(logs, "MAX_LOG_BYTES", 10)
    log = tmp_path / "a.log"
    log.write_bytes(b"0123456789")
    logs.bound_log(log)
    assert log.read_bytes() == b"0123456789"
    log.write_bytes(b"0123456789abcdef")
    logs.bound_log(log)
    assert (log.read_bytes(), log.with_suffix(".log.1").read_bytes()) == (b"", b"6789abcdef")


def test_where_nothing_can_be_kept_the_log_is_cut_all_the_same(tmp_path: Path, monkeypatch) -> None:
    """A disk that is full is what this is against."""
    monkeypatch.setattr(logs, "MAX_LOG_BYTES", 10)
    log = tmp_path / "a.log"
    log.write_bytes(b"0123456789abcdef")
    log.with_suffix(".log.1").mkdir()
    logs.bound_log(log)
    assert log.read_bytes() == b""


def make_service(log: Path, script: str, deaths: list[tuple[str, ...]]) -> Service:
    def on_death(*told: str) -> None:
        deaths.append(told)

    return Service(
        Command("one", ("-c", script)),
        log,
        lambda _: None,
        lambda *_: None,
        on_death,
    )


READY = """
import time
print('{"event": "ready"}', flush=True)
time.sleep(600)
"""


@pytest.mark.timeout(60)
def test_one_that_cannot_be_started_for_want_of_room_is_tried_again(tmp_path: Path) -> None:
    """It ended `sluice up` with all that was healthy."""
    deaths: list[tuple[str, ...]] = []

    async def scenario() -> None:
        (tmp_path / "logs").mkdir()
        service = make_service(tmp_path / "logs" / "one.log", READY, deaths)
        service.begin()
        try:
            async with asyncio.timeout(40):
                await service.ready.wait()
                (tmp_path / "logs").rename(tmp_path / "elsewhere")
                service.condemn("for the test")
                while len(deaths) < 3:  # noqa: ASYNC110 - a callback that waits for nobody
                    await asyncio.sleep(0.01)
                assert not service.ready.is_set()
                (tmp_path / "logs").mkdir()
                await service.ready.wait()
        finally:
            await service.stop()

    asyncio.run(scenario())
    assert [cause for _, cause, _ in deaths[:1]] == ["for the test"]
    assert all("it cannot be started: [Errno 2]" in cause for _, cause, _ in deaths[1:])


@pytest.mark.timeout(60)
def test_one_that_cannot_be_started_at_first_says_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        await make_service(tmp_path / "nowhere" / "one.log", READY, []).begin()

    with pytest.raises(kept.StartFailed, match=r"one did not start: it cannot be started: .*nowhere"):
        asyncio.run(scenario())


@pytest.mark.timeout(60)
def test_a_fleet_that_finds_no_room_is_told_as_soon_as_there_is_some(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(stack, "FLEET_AGAIN_S", 0.01)
    spec = stack.StackSpec(model=None, name="scripted", roles=((Role.UNIFIED, 1),), engine={})

    async def scenario() -> None:
        one = stack.Stack(spec, 1, tmp_path)
        (tmp_path / "fleet.new").mkdir()
        one._members["unified-0"] = ("unified", "127.0.0.1:7")
        one._tell_fleet()
        await asyncio.sleep(0.05)
        starting = {"role": "unified", "name": "unified-0", "down": "it is starting"}
        assert json.loads((tmp_path / "fleet.json").read_text()) == {"members": [starting]}
        (tmp_path / "fleet.new").rmdir()
        async with asyncio.timeout(20):
            while "127.0.0.1:7" not in (tmp_path / "fleet.json").read_text():  # noqa: ASYNC110 - a file
                await asyncio.sleep(0.01)

    asyncio.run(scenario())
    assert capsys.readouterr().out.count("the gateway is not told of the engines yet") == 1


def test_an_engine_that_dies_again_and_again_stays_in_the_fleet(tmp_path: Path, capsys) -> None:
    """... with the reason, so that the status page misses it."""
    spec = stack.StackSpec(model=None, name="scripted", roles=((Role.PREFILL, 1), (Role.DECODE, 1)), engine={})

    def members() -> dict[str, Member]:
        return {member.role.value: member for member in read_fleet(tmp_path / "fleet.json").members if member.role}

    async def scenario() -> None:
        one = stack.Stack(spec, 1, tmp_path)
        assert members()["decode"] == Member(Role.DECODE, "decode-0", "it is starting")
        for death in (1, 2, 3):
            one._on_death("decode-0", "exit status 1", "")
            told = members()["decode"]
            assert told.address == "decode-0"
            assert "exit status 1" in told.down
            assert told.down.endswith(f"deaths so far: {death}")
        one._on_death("gateway", "exit status 1", "")
        assert len(members()) == 2
        decode = next(service for service in one.services if service.name == "decode-0")
        decode.on_ready({"event": "ready", "address": "127.0.0.1:7"})
        assert members()["decode"] == Member(Role.DECODE, "127.0.0.1:7")
        one._on_death("decode-0", "killed by signal 9", "")
        assert "signal 9" in members()["decode"].down

    asyncio.run(scenario())
