"""A process that is started for a test or by the harness: heard, ended by its pid, and gone; and the commands."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from sluice_launch.commands import Command, engine_command, gateway_command, zygote_command
from sluice_launch.place import Place
from sluice_launch.process import Late, Process, is_running, stop_process

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]

SERVES = """
import json, time
print("no event")
print("[1]")
print(json.dumps({"event": "loading"}))
print(json.dumps({"event": "ready", "n": 1}), flush=True)
time.sleep(600)
"""
FAILS = """
import json, sys
print(json.dumps({"event": "died", "detail": "told"}), flush=True)
sys.exit("the last words")
"""
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{SERVES}"


def command(script: str) -> Command:
    return Command("one", ("-c", script))


def test_events_are_heard_and_noise_is_not(tmp_path: Path) -> None:
    process = Process(command(SERVES), tmp_path / "log")
    try:
        ready = process.wait_ready(30.0)
        assert (ready["n"], ready.name) == (1, "ready")
        assert [event.name for event in process.events] == ["loading", "ready"]
        assert process.seen("loading") is process.events[0]
        with pytest.raises(Late, match=r"'more': not within 0\.1 s"):
            process.wait_for("more", 0.1)
        assert os.getsid(process.pid) == process.pid
    finally:
        assert process.end() == -signal.SIGTERM
    assert not is_running(process.pid)


def test_one_that_ends_instead_says_why(tmp_path: Path) -> None:
    process = Process(command(FAILS), tmp_path / "log")
    with pytest.raises(Late, match=r"(?s)one ended with 1 before one is ready: .*'told'.*the last words"):
        process.wait_ready(30.0)
    with pytest.raises(Late, match="ended with 1 before 'again'"):  # it does not hang the second time either
        process.wait_for("again", 30.0)
    assert process.end() == 1


@pytest.mark.parametrize("script", [DEAF, SERVES], ids=["deaf", "stopped"])
def test_one_that_does_not_end_as_asked_is_killed(script: str) -> None:
    process = Process(command(script))
    process.wait_ready(30.0)
    if script is SERVES:
        stop_process(process.pid)
    with pytest.raises(Late, match="does not end within"):
        process.wait(0.1)
    assert process.end(0.2) == -signal.SIGKILL
    assert process.is_over


def test_the_log_of_the_life_before_stays_beside_it(tmp_path: Path) -> None:
    log = tmp_path / "one.log"
    log.write_text("before")
    process = Process(command(FAILS), log)
    assert process.wait(30.0) == process.end() == 1
    assert (log.with_suffix(".log.1").read_text(), log.read_text()) == ("before", "the last words\n")


def test_commands_end_with_this_process_and_hold_no_key(tmp_path: Path) -> None:
    place = Place(tmp_path, "secret")
    run_dir = place.run_dir("decode-0")
    spec = {"role": "decode", "name": "decode-0", "run_dir": str(run_dir), "key": place.key}
    engine = engine_command(spec, str(place.zygote))
    gateway = gateway_command(tmp_path, place.gateway_arguments("m", "bytes", "--shutdown-s", "2"), {"floor_s": 1.0})
    zygote = zygote_command(str(place.zygote))
    for made in (engine, gateway, zygote):
        assert made.argv[made.argv.index("--parent") + 1] == str(os.getpid())
        assert "secret" not in " ".join(made.argv)
    assert engine.argv[:2] == ("-m", "sluice_decode")
    assert json.loads((run_dir / "spec.json").read_text()) == spec
    for path in (run_dir / "spec.json", tmp_path / "key"):
        assert path.stat().st_mode & 0o777 == 0o600
    assert gateway.argv[gateway.argv.index("--") :][1:3] == ("--model-name", "m")
    assert zygote.is_ready({"event": "zygote-ready"})
    assert not zygote.is_ready({"event": "ready"})


def test_a_fleet_file_is_whole_at_any_time(tmp_path: Path) -> None:
    place = Place(tmp_path, "k")
    place.write_fleet([{"role": "unified", "address": "a:1"}])
    place.fleet_file.with_suffix(".new").mkdir()
    with pytest.raises(OSError):
        place.write_fleet([])
    assert json.loads(place.fleet_file.read_text()) == {"members": [{"role": "unified", "address": "a:1"}]}
