"""What `sluice up` does about services that freeze: it says who, keeps the evidence, starts them again."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(170)]


def note(stack: Any) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((Path(stack.home.name) / f"sluice-up-{stack.process.pid}.json").read_text())
    return told


def livez(told: dict[str, Any]) -> dict[str, Any]:
    with urllib.request.urlopen(f"{told['probes']}/livez", timeout=10) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def child(pid: int, word: str) -> int:
    (found,) = [p.pid for p in psutil.Process(pid).children() if word in " ".join(p.cmdline())]
    return found


def test_a_frozen_leader_is_named_its_evidence_stays_and_its_service_comes_back(up):
    stack = up("--scripted", "--wedge-floor-s", "1")
    stack.wait("Ctrl-C stops it")
    services = {told["name"]: told for told in note(stack)["services"]}
    assert set(services) == {"gateway", "prefill-0", "decode-0"}
    for told in services.values():
        assert livez(told)["verdict"] == "idle"
        assert told["debug"].startswith("http://127.0.0.1:")
        assert Path(told["run_dir"]).is_dir()
    before = len(stack.lines)
    os.kill(child(stack.service("sluice_decode"), "sluice_engine.leader.main"), signal.SIGSTOP)
    stack.wait(r"decode-0: incident: Wedged: \w+: leader\.\w+ .*stopped by a signal", start=before)
    path = stack.wait(r"decode-0: evidence \(may hold prompts\): .*sluice doctor (\S+)", start=before)[1]
    stack.wait("serving again", start=before)
    assert stack.interrupt() == 0
    assert path.startswith(f"{stack.state.name}/sluice/evidence/decode-0/incident-0001-")
    assert (Path(path) / "recorder.bin").exists()


def test_a_service_whose_supervisor_does_not_answer_is_killed_and_started_again(up):
    stack = up("--scripted", "--unified")
    stack.wait("Ctrl-C stops it")
    before = len(stack.lines)
    os.kill(stack.service("sluice_gateway"), signal.SIGSTOP)
    stack.wait(r"gateway died \(its supervisor does not answer /livez: .*3 times in a row\)", start=before)
    stack.wait("serving again", start=before)
    assert stack.interrupt() == 0


def test_after_three_incidents_a_service_is_quarantined_if_asked_for(up):
    stack = up("--scripted", "--unified", "--quarantine-s", "3600")
    stack.wait("Ctrl-C stops it")
    for _ in range(3):
        before = len(stack.lines)
        os.kill(child(stack.service("sluice_gateway"), "sluice_gateway"), signal.SIGKILL)
        if stack.wait("serving again|gateway is quarantined", start=before)[0] == "gateway is quarantined":
            break
    told = {told["name"]: told for told in note(stack)["services"]}["gateway"]
    answer = livez(told)
    assert (answer["quarantined"], answer["reason"]) == (True, "GatewayDead")
    stack.wait("gateway is quarantined after 3 incidents")
    assert stack.interrupt() == 0


def test_a_zygote_that_does_not_answer_takes_nobody_along(up):
    """A second one serves the engine that needs a rank; the others keep their processes."""
    stack = up("--decode", "2")
    stack.wait("Ctrl-C stops it")
    before = len(stack.lines)
    ready = {told["name"]: told["pid"] for told in note(stack)["services"]}
    os.kill(stack.service("sluice_engine.rank.zygote"), signal.SIGSTOP)
    os.kill(ready["decode-1"], signal.SIGKILL)
    stack.wait("zygote: it does not answer: .*another one is started", start=before)
    stack.wait("decode-1 is ready", start=before)
    stack.wait("serving again", start=before)
    after = {told["name"]: told["pid"] for told in note(stack)["services"]}
    assert {name for name in ready if after[name] != ready[name]} == {"decode-1"}
    assert not [line for line in stack.lines[before:] if "decode-0 died" in line or "prefill-0 died" in line]
    assert stack.interrupt() == 0
