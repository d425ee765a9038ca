"""The gateway under its supervisor, as processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from stack_double import RunningStack

from sluice_launch.process import Late, eventually

pytestmark = [pytest.mark.process, pytest.mark.timeout(110)]


@pytest.fixture
def stack() -> Iterator[RunningStack]:
    with RunningStack() as running:
        yield running


def begin(stack: RunningStack, **health: Any) -> dict[str, Any]:
    """Its `supervising` event with the pid of the gateway."""
    stack.start("unified")
    stack.start_gateway(health=health)
    told = events(stack)
    return told["supervising"] | {"gateway": told["ready"]["pid"]}


def get(url: str) -> tuple[int, Any]:
    try:
        with urlopen(url, timeout=10) as response:
            return response.status, json.load(response)
    except HTTPError as error:
        return error.code, json.load(error)


def events(stack: RunningStack) -> dict[str, dict[str, Any]]:
    assert stack.gateway is not None
    return {event["event"]: event for event in stack.gateway.events}


def test_the_supervisor_answers_for_it_and_sigterm_is_passed_on(stack: RunningStack) -> None:
    told = begin(stack)
    assert stack.chat("hi").text()
    assert get(f"{told['probes']}/livez")[0] == get(f"{told['probes']}/readyz")[0] == 200

    def counted() -> Any:
        status = get(f"{told['probes']}/status")[1]
        loop = next(row for row in status["rows"] if row["name"] == "gateway.loop")
        done = status["gateway"]["counters"]["answered"] == loop["progress"] == 1
        return status if done and loop["pid"] == told["gateway"] else None

    status = eventually(counted, "the answer is counted in the mirror")
    assert (status["role"], status["gateway"]["queued"], status["gateway"]["running"]) == ("gateway", 0, 0)
    engine = status["gateway"]["engines"][0]
    assert (engine["role"], engine["trouble"]) == ("unified", "")
    assert engine["health"].startswith("http://127.0.0.1:")
    assert engine["load"]["max_running"] > 0
    assert stack.gateway is not None
    assert stack.gateway.end() == 0


def test_a_killed_gateway_is_a_death_with_evidence(stack: RunningStack) -> None:
    told = begin(stack)
    os.kill(told["gateway"], signal.SIGKILL)
    assert stack.gateway is not None
    assert stack.gateway.popen.wait(30) == 1
    stack.gateway.end()
    said = events(stack)
    assert (said["incident"]["reason"], said["incident"]["culprit"]) == ("GatewayDead", "gateway")
    assert said["died"]["cause"].startswith("Dead: GatewayDead: gateway (ended with -9)")
    assert (Path(said["evidence"]["path"]) / "recorder.bin").exists()


def test_a_gateway_that_cannot_import_says_what(stack: RunningStack, tmp_path: Path, monkeypatch) -> None:
    stack.start("unified")
    (tmp_path / "tokenizers").mkdir()
    (tmp_path / "tokenizers" / "__init__.py").write_text("import not_there_at_all")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(Late, match="gateway ended with 1 before"):
        stack.start_gateway(health={})
    cause = events(stack)["died"]["cause"]
    assert cause.startswith("Dead: GatewayDead: gateway (ended with 1: ModuleNotFoundError: No module named")
    assert "not_there_at_all" in cause


def test_a_stopped_gateway_is_a_wedge_with_its_state(stack: RunningStack) -> None:
    told = begin(stack, floor_s=1.0)
    os.kill(told["gateway"], signal.SIGSTOP)
    assert stack.gateway is not None
    assert stack.gateway.popen.wait(40) == 3
    stack.gateway.end()
    said = events(stack)
    assert (said["incident"]["reason"], said["incident"]["culprit"]) == ("EventLoopBlocked", "gateway.loop")
    assert "stopped by a signal" in said["incident"]["message"]
    assert "State:\tT" in (Path(said["evidence"]["path"]) / "gateway.proc").read_text()


def drain_while_stopped(stack: RunningStack, told: dict[str, Any]) -> None:
    assert stack.gateway is not None
    os.kill(told["gateway"], signal.SIGSTOP)
    stack.gateway.popen.send_signal(signal.SIGTERM)
    eventually(lambda: get(f"{told['probes']}/readyz")[0] == 503, "it drains")


def test_a_gateway_that_dies_in_its_drain_is_a_death_all_the_same(stack: RunningStack) -> None:
    """It was told as a good end: status 0, and no evidence."""
    told = begin(stack)
    drain_while_stopped(stack, told)
    os.kill(told["gateway"], signal.SIGKILL)
    assert stack.gateway is not None
    assert stack.gateway.popen.wait(30) == 1
    said = events(stack)
    assert (said["incident"]["reason"], said["incident"]["culprit"]) == ("GatewayDead", "gateway")


def test_a_gateway_that_freezes_in_its_drain_is_named_in_its_budget(stack: RunningStack) -> None:
    told = begin(stack, floor_s=1.0)
    drain_while_stopped(stack, told)
    assert stack.gateway is not None
    assert stack.gateway.popen.wait(40) == 3
    said = events(stack)
    assert (said["incident"]["reason"], said["incident"]["culprit"]) == ("EventLoopBlocked", "gateway.loop")
    assert "stopped by a signal" in said["incident"]["message"]


def test_a_supervisor_that_is_killed_takes_the_gateway_with_it(stack: RunningStack) -> None:
    told = begin(stack)
    assert stack.gateway is not None
    stack.gateway.popen.kill()
    eventually(lambda: not Path(f"/proc/{told['gateway']}").exists(), "the gateway is gone")


def test_arguments_that_the_gateway_refuses_are_no_incident(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "sluice_gateway.supervised", "--run-dir", str(tmp_path), "--"]
    done = subprocess.run(
        [*argv, "--model-name", "m", "--tokenizer", "bytes", "--fleet-file", "/nowhere"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "/nowhere" in done.stderr
    assert "incident" not in done.stdout
