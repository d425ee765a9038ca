"""The log of a service that `sluice up` runs is bounded while it runs: it may run for months."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sluice_cli import services
from sluice_cli.services import Service

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
    monkeypatch.setattr(services, "MAX_LOG_BYTES", LIMIT)
    monkeypatch.setattr(services, "LOG_LOOK_S", 0.01)
    log = tmp_path / "talker.log"

    async def scenario() -> None:
        said: list[object] = []
        service = Service(
            "talker",
            ("-c", TALKATIVE),
            log,
            lambda event: event.get("event") == "ready",
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
    monkeypatch.setattr(services, "MAX_LOG_BYTES", 10)
    log = tmp_path / "a.log"
    log.write_bytes(b"0123456789")
    services.bound_log(log)
    assert log.read_bytes() == b"0123456789"
    log.write_bytes(b"0123456789abcdef")
    services.bound_log(log)
    assert (log.read_bytes(), log.with_suffix(".log.1").read_bytes()) == (b"", b"6789abcdef")


def test_where_nothing_can_be_kept_the_log_is_cut_all_the_same(tmp_path: Path, monkeypatch) -> None:
    """A disk that is full is what this is against."""
    monkeypatch.setattr(services, "MAX_LOG_BYTES", 10)
    log = tmp_path / "a.log"
    log.write_bytes(b"0123456789abcdef")
    log.with_suffix(".log.1").mkdir()
    services.bound_log(log)
    assert log.read_bytes() == b""
