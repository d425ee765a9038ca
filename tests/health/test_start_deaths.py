"""Engines whose start goes wrong before anybody listens, and supervisors whom nobody hears: the same evidence, message
and incident as ever, and an end."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from sluice_launch.commands import Command
from sluice_launch.process import Process, eventually, stop_process
from sluice_runtime.health.incidents import read_incidents

MODEL = Path(__file__).parents[2] / "models" / "recall-1m"

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]


def write_spec(run_dir: Path, **fields: Any) -> str:
    health = {"floor_s": 3.0, "start_s": 6.0, "quarantine_s": 0.0} | fields.pop("health", {})
    told = {"role": "unified", "name": "u-0", "run_dir": str(run_dir), "scripted": {}, "health": health, "key": "k"}
    path = run_dir / "in.json"
    path.write_text(json.dumps(told | fields))
    return str(path)


@contextmanager
def supervised(run_dir: Path, **fields: Any) -> Iterator[Process]:
    process = Process(
        Command("u-0", ("-m", "sluice_engine.supervisor.supervise", "--spec", write_spec(run_dir, **fields)))
    )
    try:
        yield process
    finally:
        process.end(5)


def leader_of(supervisor: int) -> int:
    for child in psutil.Process(supervisor).children():
        if "sluice_engine.leader.main" in child.cmdline():
            return child.pid
    return 0


def early_leader(process: Process) -> int:
    """It imports for much longer than we look for it."""
    leader: int = eventually(lambda: leader_of(process.pid), "a leader")
    assert not any(event["event"] == "loading" for event in process.events)
    return leader


def assert_told(run_dir: Path, reason: str, culprit: str, *words: str) -> None:
    """In the message, in the list of incidents, and in a bundle."""
    message = (run_dir / "termination-log").read_text()
    assert f"{reason}: {culprit}" in message
    for word in words:
        assert word in message
    (incident,) = read_incidents(run_dir / "evidence")
    assert (incident.reason, incident.culprit) == (reason, culprit)
    (bundle,) = (run_dir / "evidence").glob("incident-*")
    assert json.loads((bundle / "verdict.json").read_text())["reason"] == reason


def test_a_leader_killed_before_it_listens(tmp_path: Path) -> None:
    with supervised(tmp_path, health={"start_s": 60.0}) as process:
        os.kill(early_leader(process), signal.SIGKILL)
        assert process.popen.wait(60) == 1
    assert_told(tmp_path, "LeaderDead", "leader", "ended with -9")


def test_last_words_of_a_leader_that_never_listens(tmp_path: Path) -> None:
    """No Unix socket has so long a path."""
    run_dir = tmp_path / ("x" * 120)
    run_dir.mkdir()
    with supervised(run_dir, health={"start_s": 60.0}) as process:
        assert process.popen.wait(60) == 1
    assert_told(run_dir, "LeaderDead", "leader", "path too long")


def test_a_probe_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        with supervised(tmp_path, ports={"probe": port}) as process:
            assert process.popen.wait(60) == 1
    assert_told(tmp_path, "StartFailed", "supervisor", f"probe port {port} of 127.0.0.1 is taken")


def test_a_start_that_fails_is_never_held(tmp_path: Path) -> None:
    """It was kept for ten minutes, with no port at which anybody could have seen that."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        health = {"debug_port": port, "quarantine_s": 3600.0, "quarantine_after": 1}
        with supervised(tmp_path, health=health) as process:
            assert process.popen.wait(60) == 1
    assert_told(tmp_path, "StartFailed", "supervisor", f"debug port {port} of 127.0.0.1 is taken")


LATE_SIGNAL = """
import atexit, os, signal, sys
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
from {module} import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("service", ["engine", "gateway"])
def test_a_signal_that_comes_after_the_end_does_not_replace_its_status(tmp_path: Path, service: str) -> None:
    """The loop had given SIGTERM back to the system, which ended the process with -15: a wedge told as a wish."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        if service == "engine":
            program = LATE_SIGNAL.format(module="sluice_engine.supervisor.supervise")
            arguments = ["--spec", write_spec(tmp_path, ports={"probe": port})]
        else:
            program = LATE_SIGNAL.format(module="sluice_gateway.supervised")
            arguments = [
                "--name",
                "g",
                "--run-dir",
                str(tmp_path),
                "--probe-port",
                str(port),
                "--",
                "--model-name",
                "m",
            ]
        done = subprocess.run([sys.executable, "-c", program, *arguments], timeout=60, capture_output=True)
    assert done.returncode == 1, done.stderr.decode()
    assert_told(tmp_path, "StartFailed", "supervisor", f"probe port {port} of 127.0.0.1 is taken")


def test_a_leader_frozen_before_it_listens(tmp_path: Path) -> None:
    with supervised(tmp_path) as process:
        stop_process(early_leader(process))
        assert process.popen.wait(60) == 3
    assert (tmp_path / "termination-log").read_text().startswith("Wedged: StartStalled: ")
    assert list((tmp_path / "evidence").glob("incident-*"))


def test_an_end_that_is_asked_for_while_the_leader_is_frozen_at_its_start(tmp_path: Path) -> None:
    with supervised(tmp_path, health={"start_s": 600.0}, drain_s=0.5) as process:
        stop_process(early_leader(process))
        process.popen.terminate()
        assert process.popen.wait(60) == 3
    assert_told(tmp_path, "DrainStalled", "leader.loop")


def test_a_stdout_that_nobody_reads_stops_no_supervisor(tmp_path: Path) -> None:
    with ExitStack() as after:
        reading, writing = os.pipe()
        after.callback(os.close, reading)
        argv = (sys.executable, "-m", "sluice_engine.supervisor.supervise", "--spec", write_spec(tmp_path))
        process = subprocess.Popen(argv, stdout=writing)
        after.callback(process.wait, 10)
        after.callback(process.kill)
        said = b""
        while b'"ready"' not in said:
            said += os.read(reading, 65536)
        fill(writing)
        os.close(writing)
        stop_process(leader_of(process.pid))
        assert process.wait(90) == 3
    assert_told(tmp_path, "SchedulerFrozen", "leader.loop", "stopped by a signal")


def test_weights_that_come_slowly_are_no_stalled_start(tmp_path: Path) -> None:
    """Drop by drop, for three times as long as a start may stand, before the leader has done anything else."""
    model, start_s = tmp_path / "model", 5.0
    model.mkdir()
    shutil.copy(MODEL / "config.json", model)
    os.mkfifo(model / "model.safetensors")
    with supervised(tmp_path, scripted=None, model=str(model), health={"start_s": start_s}) as process:
        with (model / "model.safetensors").open("wb", buffering=0) as weights:  # waits for the leader
            deadline = time.monotonic() + 3 * start_s
            while time.monotonic() < deadline:
                weights.write(b"x" * 4096)
                assert process.popen.poll() is None, process.events[-1]
                time.sleep(0.2)
            assert process.popen.wait(60) == 3  # nothing comes any more
    assert (tmp_path / "termination-log").read_text().startswith("Wedged: StartStalled: ")


def test_last_words_about_weights_that_cannot_be_read(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(MODEL / "config.json", model)
    (model / "model.safetensors").mkdir()
    with supervised(tmp_path, scripted=None, model=str(model), health={"start_s": 60.0}) as process:
        assert process.popen.wait(60) == 1
    assert_told(tmp_path, "LeaderDead", "leader", "IsADirectoryError")


def fill(writing: int) -> None:
    """To the last byte. Whoever else writes there still waits: a description of our own is what does not."""
    fd = os.open(f"/proc/self/fd/{writing}", os.O_WRONLY | os.O_NONBLOCK)
    try:
        for block in (b"x" * fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ), b"x" * 4096, b"x"):
            try:
                while True:
                    os.write(fd, block)
            except BlockingIOError:
                continue
    finally:
        os.close(fd)


def shadow(folder: Path, monkeypatch: pytest.MonkeyPatch, **modules: str) -> None:
    """Modules of these names and sources come before the installed ones, in every child."""
    folder.mkdir()
    for name, source in modules.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_what_a_library_says_only_on_stderr_is_in_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL's exception has a code; the sentence that explains it is a line of its native logger."""
    source = """
import os
class nixl_thread_sync_t:
    NIXL_THREAD_SYNC_STRICT = 0
def nixl_agent_config(**told): return None
def nixl_agent(name, config):
    os.write(2, b"E1201 config.cpp:84] Invalid UCX_TLS: the key k-is-a-secret is not for this lane\\n")
    raise RuntimeError("NIXL_ERR_BACKEND")
"""
    modules = dict.fromkeys(("nixl_cu13", "nixl_cu12"), source)
    shadow(tmp_path / "shadow", monkeypatch, **modules)
    for name in modules:
        (tmp_path / "shadow" / name / "_bindings.py").write_text("class nixlAgentConfig: pass\n")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with supervised(run_dir, role="prefill", health={"start_s": 60.0}, key="k-is-a-secret") as process:
        assert process.popen.wait(60) == 1
    assert_told(run_dir, "SidecarDead", "sidecar", "NIXL_ERR_BACKEND", "Invalid UCX_TLS", "is not for this lane")
    assert "k-is-a-secret" not in (run_dir / "termination-log").read_text()
    (bundle,) = (run_dir / "evidence").glob("incident-*")
    about = json.loads((bundle / "about.json").read_text())
    assert any("Invalid UCX_TLS" in line for line in about["processes"]["sidecar"]["stderr"])


def test_a_leader_that_cannot_import_says_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shadow(tmp_path / "shadow", monkeypatch, grpc="import not_there_at_all")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with supervised(run_dir, health={"start_s": 60.0}) as process:
        assert process.popen.wait(60) == 1
    assert_told(run_dir, "LeaderDead", "leader", "No module named 'not_there_at_all'")
