"""A bundle that is damaged, or that somebody made up, is told of as far as it goes: no traceback, and nothing that a
terminal would obey."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from sluice_cli import evidence
from sluice_cli.__main__ import main
from sluice_cli.diagnosis import diagnose
from sluice_cli.doctor_words import render
from sluice_cli.evidence import open_evidence
from sluice_engine.supervisor.engine_kind import engine_kind
from sluice_engine.watched_rows import EngineMirror, EngineReason, EngineWriter
from sluice_gateway.status.watched_rows import GATEWAY_KIND, GATEWAY_MIRROR
from sluice_protocol.generate import Role
from sluice_runtime.health import layout
from sluice_runtime.health.evidence import write_bundle
from sluice_runtime.health.layout import Phase
from sluice_runtime.health.recorder import Recorder, RecorderNames
from sluice_runtime.health.verdict import Kind, Verdict

BOOKS = {"ledger": {"page": {"free": 6}}, "sequences": {"decoding": 2}, "waiting": 1, "oldest_waiting_s": 4.0}
GATEWAY = {"queued": 5, "running": 1, "reason": "", "engines": [{"role": "decode", "address": "a:1", "trouble": ""}]}
TRANSFERS = {"leases": 1, "in_flight": 2, "stranded": 0, "pulls": [{"lease": "L1", "done": 5}]}
LEASES = [{"side": "reader", "sequence": 3, "lease": "L1"}]
MIRRORS = {
    EngineMirror.BOOKS: BOOKS,
    GATEWAY_MIRROR: GATEWAY,
    EngineMirror.TRANSFERS: TRANSFERS,
    EngineMirror.LEASES: LEASES,
}
ODD = [None, 3, "x", [], {}, [3], {"a": 3}, {"spec": 3}, {"spec": {"name": 3, "role": []}}, {"pulls": 3}, [[]],
       {"verdict": "wedged"}, {"ledger": {"page": 3}, "sequences": {}, "waiting": 1, "oldest_waiting_s": 4.0},
       {"ledger": {}, "sequences": {}, "waiting": 1, "oldest_waiting_s": "long"}, {"queued": 1, "running": 1,
       "engines": [3]}, {"queued": "many", "running": 1, "engines": []}, {"leases": 1}, {"leases": 1, "in_flight": 2,
       "stranded": 0, "pulls": [3]}, 10**400, float("nan")]  # fmt: skip


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    """Of a decode engine and a gateway in one: all that a doctor may have to tell of."""
    engine = engine_kind(Role.DECODE, "nixl").recorded
    rows = (*engine.rows, *GATEWAY_KIND.recorded.rows)
    names = RecorderNames(rows, (*engine.mirrors, GATEWAY_MIRROR), engine.writers)
    made = Recorder.create(tmp_path / "recorder", names)
    for row in rows:
        made.row(row).begin(Phase.SERVING)
    for mirror, value in MIRRORS.items():
        made.mirror(mirror, value)
    made.step_sent(0, b"frame", bytes(16), 2, 1, 1000)
    made.event(EngineWriter.LEADER, "readiness: ready")
    return made


@pytest.fixture
def bundle(tmp_path: Path, recorder: Recorder) -> Path:
    verdict = Verdict(Kind.WEDGED, EngineReason.DEVICE_STUCK, "rank0.device", "device", 33.0, 30.0, 1)
    return write_bundle(tmp_path / "evidence", tmp_path, recorder, verdict, {}, {"spec": {"name": "d", "role": "r"}})


def told_of(path: Path) -> str:
    text = render(diagnose(open_evidence(path), show_tokens=True))
    json.dumps(diagnose(open_evidence(path), show_tokens=True), default=str)
    for character in text:
        assert character.isprintable() or character == "\n", repr(character)
    return text


@pytest.mark.parametrize("value", ODD, ids=lambda value: repr(value)[:30])
@pytest.mark.parametrize("mirror", list(MIRRORS), ids=str)
def test_a_mirror_of_another_shape_is_left_out_and_said(bundle: Path, recorder: Recorder, mirror: str, value) -> None:
    assert "damaged" not in told_of(bundle).lower()
    recorder.mirror(mirror, value)
    (bundle / "recorder.bin").write_bytes(bytes(recorder.view))
    text = told_of(bundle)
    assert "WEDGED: DeviceStuck" in text
    if isinstance(value, int):
        assert f"Damaged, and left out: {mirror}" in text


@pytest.mark.parametrize("value", ODD, ids=lambda value: repr(value)[:30])
@pytest.mark.parametrize("name", ["verdict.json", "about.json"])
def test_a_document_of_another_shape_is_left_out_and_said(bundle: Path, name: str, value) -> None:
    (bundle / name).write_text(json.dumps(value))
    text = told_of(bundle)
    assert "Last steps" in text
    if not isinstance(value, dict):
        assert f"Damaged, and left out: {name}" in text


@pytest.mark.parametrize("name", ["verdict.json", "about.json"])
@pytest.mark.parametrize("data", [b"\xff\xfe", b"{", b"[" * 200_000], ids=["no text", "cut", "deep"])
def test_a_document_that_is_none_is_left_out_and_said(bundle: Path, name: str, data: bytes) -> None:
    (bundle / name).write_bytes(data)
    assert f"Damaged, and left out: {name}" in told_of(bundle)


def test_a_mirror_that_is_nested_too_deep_is_left_out_and_said(bundle: Path, recorder: Recorder) -> None:
    recorder.mirror(EngineMirror.BOOKS, "x" * (layout.MIRROR_BYTES - 2))
    at = layout.mirror_at(0) + layout.MIRROR_HEAD_BYTES
    recorder.view[at : at + layout.MIRROR_BYTES] = b"[" * layout.MIRROR_BYTES
    (bundle / "recorder.bin").write_bytes(bytes(recorder.view))
    assert "WEDGED" in told_of(bundle)


@pytest.mark.parametrize("seed", range(12))
def test_bytes_that_have_changed_are_told_as_far_as_they_go(bundle: Path, seed: int) -> None:
    rng = random.Random(seed)
    data = bytearray((bundle / "recorder.bin").read_bytes())
    head = layout.HEADER_BYTES
    if seed % 3 == 0:
        for _ in range(2000):
            data[rng.randrange(head, len(data))] = rng.randrange(256)
    elif seed % 3 == 1:
        at = rng.randrange(head, layout.STEPS_AT)
        data[at : at + 4096] = rng.randbytes(4096)
    else:
        data[head:] = rng.randbytes(len(data) - head)
    (bundle / "recorder.bin").write_bytes(data)
    told_of(bundle)
    (bundle / "verdict.json").unlink()
    told_of(bundle)


def test_what_a_terminal_would_obey_is_told_in_letters(bundle: Path, recorder: Recorder, capsys) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\nWEDGED: forged"
    recorder.event(EngineWriter.LEADER, evil)
    recorder.row("leader.loop").doing(evil)
    recorder.mirror(EngineMirror.BOOKS, {**BOOKS, "sequences": {evil: 1}})
    (bundle / "recorder.bin").write_bytes(bytes(recorder.view))
    (bundle / "about.json").write_text(json.dumps({"spec": {"name": evil, "role": evil}}))
    (bundle / "rank0.stacks").write_text(evil)
    (bundle / "rank0.proc").write_text(f"State:\t{evil}")
    assert main(["doctor", str(bundle)]) == 0
    text = capsys.readouterr().out
    assert all(character.isprintable() or character == "\n" for character in text)
    assert r"\x1b]0;owned\x07\x1b[2J" in text
    assert "\nWEDGED: forged" not in text


def test_what_is_no_file_or_has_no_end_is_not_read(bundle: Path, monkeypatch, capsys) -> None:
    """It hung on a pipe, and took all the memory there was for /dev/zero."""
    monkeypatch.setattr(evidence, "MAX_TEXT_BYTES", 10_000)
    os.mkfifo(bundle / "a.stacks")
    (bundle / "b.stacks").symlink_to("/dev/zero")
    (bundle / "c.proc").write_text("x" * 20_000)
    told = open_evidence(bundle)
    assert told.stacks["a"] == told.stacks["b"] == "it cannot be read: it is no regular file\n"
    assert told.processes["c"] == "x" * 10_000 + "\n[cut]\n"
    os.mkfifo(bundle.parent / "pipe")
    assert main(["doctor", str(bundle.parent / "pipe")]) == 2
    assert "it is no regular file; give a bundle's folder" in capsys.readouterr().err
    os.truncate(bundle / "recorder.bin", 200 << 30)
    assert main(["doctor", str(bundle)]) == 2
    assert "a flight recorder of" in capsys.readouterr().err
