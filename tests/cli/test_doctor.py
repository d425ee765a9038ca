"""What `sluice doctor` makes of evidence: real recorders, real bundles, real stacks, and files that are none."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice_cli.__main__ import main
from sluice_cli.advice import ADVICE
from sluice_cli.evidence import EvidenceError, open_evidence
from sluice_engine.step import RowWork, StepRecord, encode_step
from sluice_engine.supervisor.engine_kind import engine_kind
from sluice_engine.watched_rows import EngineMirror, EngineReason, EngineWriter
from sluice_gateway.status.watched_rows import GATEWAY_KIND, GATEWAY_MIRROR
from sluice_protocol.generate import Role
from sluice_runtime.health import layout, stacks
from sluice_runtime.health.evidence import write_bundle
from sluice_runtime.health.layout import SUPERVISOR, Phase
from sluice_runtime.health.recorder import Recorder
from sluice_runtime.health.stacks import STACKS_SIGNAL, answer_with_stacks
from sluice_runtime.health.verdict import Kind, Verdict

BOOKS = {
    "ledger": {"page": {"free": 6, "filling": 1, "live": 3, "stranded": 0}},
    "sequences": {"decoding": 2},
    "waiting": 1,
    "oldest_waiting_s": 4.0,
}
SECRET = 31337


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    """An engine whose rank has not answered its second step."""
    made = Recorder.create(tmp_path / "recorder", engine_kind(Role.DECODE, "nixl").recorded)
    leader, rank, device = made.row("leader.loop"), made.row("rank0.loop"), made.row("rank0.device")
    for row in (leader, rank, device):
        row.begin(Phase.SERVING)
    chain = bytes(16)
    for number in (0, 1):
        record = StepRecord(number, work=(RowWork(0, 0, (SECRET, 7), True),))
        frame, chain = encode_step(record, chain)
        made.step_sent(number, frame, chain, 2, 1, 1000)
    made.step_done(0)
    leader.step(2)
    leader.progress(1)
    leader.pending(2)
    rank.progress(1)
    rank.enter(Phase.DEVICE)
    device.pending(1)
    device.enter(Phase.DEVICE)
    made.mirror(EngineMirror.BOOKS, BOOKS)
    made.mirror(EngineMirror.LEASES, [{"side": "reader", "sequence": 3, "lease": "L1", "state": "pulling"}])
    made.mirror(
        EngineMirror.TRANSFERS, {"leases": 1, "in_flight": 2, "stranded": 0, "pulls": [{"lease": "L1", "done": 5}]}
    )
    made.event(EngineWriter.LEADER, "readiness: ready")
    return made


STUCK = Verdict(Kind.WEDGED, EngineReason.DEVICE_STUCK, "rank0.device", "device", 33.0, 30.0, 1)


def bundle(tmp_path: Path, recorder: Recorder, verdict: Verdict, **pids: int) -> Path:
    about = {"spec": {"name": "decode-0", "role": "decode"}}
    return write_bundle(tmp_path / "evidence", tmp_path, recorder, verdict, pids, about)


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["doctor", *argv]) == 0
    return capsys.readouterr().out


def findings(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(said(capsys, *argv, "--json"))
    return told


def test_a_bundle_says_what_was_stuck_where_since_when_and_who_waited(capsys, tmp_path, recorder):
    text = said(capsys, str(bundle(tmp_path, recorder, STUCK)))
    for words in (
        "decode-0 (decode): WEDGED: DeviceStuck",
        "rank0.device had been device without progress for 33.0 s (its budget: 30.0 s).",
        f"That means: {ADVICE[EngineReason.DEVICE_STUCK].meaning}.",
        "leader.loop -> rank0.loop: step 1 was sent, this rank has answered up to step 0",
        "rank0.loop -> rank0.device: the model runs",
        "sequences: 2 decoding; 1 of them wait, the oldest for 4.0 s",
        "page records: 6 free, 1 filling, 3 live",
        "reader of sequence 3: lease L1, state pulling",
        "1 leases, 2 READs in flight, 0 stranded",
        "lease L1, done 5",
        "2 tokens in 1 rows: NOT ANSWERED (2 prefill_tokens)",
        "2 tokens in 1 rows: answered after",
        "leader: readiness: ready",
        "It may hold prompts and answers",
    ):
        assert words in text, words


def test_tokens_are_told_only_to_who_asks(capsys, tmp_path, recorder):
    path = str(bundle(tmp_path, recorder, STUCK))
    assert str(SECRET) not in said(capsys, path)
    assert str(SECRET) not in json.dumps(findings(capsys, path)["steps"])
    assert str(SECRET) in said(capsys, path, "--show-tokens")


def test_a_bare_copy_of_a_recorder_names_who_has_work_behind_it(capsys, tmp_path, recorder):
    copy = tmp_path / "copy"
    copy.write_bytes(bytes(recorder.view))
    told = findings(capsys, str(copy))
    assert told["kind"] == "recorder"
    assert [(wait["who"], wait["on"]) for wait in told["waits"]] == [
        ("leader.loop", "rank0.loop"),
        ("rank0.loop", "rank0.device"),
    ]
    assert "engine: nothing is over its budget" in said(capsys, str(copy))
    aged = age(copy, 60)
    assert findings(capsys, str(aged))["verdict"]["culprit"] == "rank0.device"
    assert "engine: looks wedged: DeviceStuck" in said(capsys, str(aged))


def age(copy: Path, seconds: int) -> Path:
    """The same recorder with an event so much later: what was pending has been so for that long."""
    recorder = Recorder.attach(copy)
    recorder.event(SUPERVISOR, "still here")
    at = layout.event_at(0, 1) + layout.WORD
    later = int.from_bytes(recorder.view[at : at + 8], "little") + seconds * 10**9
    recorder.view[at : at + 8] = later.to_bytes(8, "little")
    return copy


@pytest.fixture
def answers_with_stacks(tmp_path: Path) -> Iterator[None]:
    """This process answers with its stacks as the leader does."""
    answer_with_stacks(tmp_path, "leader")
    yield
    faulthandler.unregister(STACKS_SIGNAL)
    stacks._held.pop().close()  # held for the life of a process; ours goes on


def test_the_stack_is_that_of_the_culprits_thread(capsys, tmp_path, recorder, answers_with_stacks):
    began, over = threading.Event(), threading.Event()

    def waits_for_a_lock_that_nobody_gives_back() -> None:
        recorder.row("leader.lease").begin(Phase.SERVING)
        began.set()
        over.wait()

    thread = threading.Thread(target=waits_for_a_lock_that_nobody_gives_back)
    thread.start()
    began.wait()
    verdict = Verdict(Kind.WEDGED, EngineReason.LEASE_THREAD_DEAD, "leader.lease", "serving", 31.0, 30.0)
    path = bundle(tmp_path, recorder, verdict, leader=os.getpid())
    over.set()
    thread.join()
    stack = findings(capsys, str(path))["stack"]
    assert stack["why"] == ""
    assert "in waits_for_a_lock_that_nobody_gives_back" in "\n".join(stack["lines"])
    assert sum("hread 0x" in line for line in stack["lines"]) == 1
    text = said(capsys, str(path))
    assert "Nothing was pending there: its loop, which turns at least once a second, did not turn." in text
    assert "Stack of the culprit in leader" in text


def test_a_death_is_told_as_one(capsys, tmp_path, recorder):
    recorder.row("sidecar.poller").begin(Phase.POLLING)
    recorder.row("sidecar.poller").end(failed=True)
    recorder.event(SUPERVISOR, "leader ended with -9 ")
    verdict = Verdict(Kind.DEAD, EngineReason.LEADER_DEAD, "leader", "planning", detail="ended with -9")
    text = said(capsys, str(bundle(tmp_path, recorder, verdict)))
    assert "DEAD: LeaderDead" in text
    assert "leader has died: ended with -9." in text
    assert "sidecar.poller: its loop has ended: polling" in text
    assert "there are no stacks of it here" in text


def test_a_gateway_has_findings_too(capsys, tmp_path):
    made = Recorder.create(tmp_path / "recorder", GATEWAY_KIND.recorded)
    loop, tokenizer = made.row("gateway.loop"), made.row("gateway.tokenizer")
    loop.begin(Phase.SERVING)
    tokenizer.begin(Phase.ENCODING)
    tokenizer.pending(2)
    engines = [{"role": "decode", "address": "a:1", "trouble": "NoLoad"}]
    made.mirror(GATEWAY_MIRROR, {"queued": 5, "running": 1, "reason": "no pair", "counters": {}, "engines": engines})
    text = said(capsys, str(tmp_path / "recorder"))
    assert "requests -> gateway.tokenizer: 2 prompts in the pool" in text
    assert "requests -> engines: 5 queued; no pair" in text
    assert "decode a:1: NoLoad" in text


def test_a_step_that_was_kept_in_part_is_told_without_its_counts(capsys, tmp_path, recorder):
    record = StepRecord(2, work=(RowWork(0, 0, tuple(range(20000)), True),))
    frame, chain = encode_step(record, bytes(16))
    recorder.step_sent(2, frame, chain, 20000, 1, 0)
    assert "kept in part only" in said(capsys, str(bundle(tmp_path, recorder, STUCK)), "--show-tokens")


def changed(view: memoryview, at: int, value: int) -> bytes:
    data = bytearray(view)
    data[at * layout.WORD : (at + 1) * layout.WORD] = value.to_bytes(layout.WORD, "little")
    return bytes(data)


def test_files_that_are_no_recorder_are_refused_with_a_remedy(capsys, tmp_path, recorder):
    whole = bytes(recorder.view)
    for name, data, words in (
        ("empty", b"", "no flight recorder of Sluice"),
        ("foreign", b"\x7fELF" * 100, "no flight recorder of Sluice"),
        ("cut", whole[:5000], "the copy is cut; copy the whole file again"),
        ("older", changed(recorder.view, layout.Header.VERSION, layout.VERSION - 1), "use the one of the Sluice that"),
        (
            "newer",
            changed(recorder.view, layout.Header.VERSION, layout.VERSION + 1)[:9000],
            "use the one of the Sluice",
        ),
    ):
        path = tmp_path / name
        path.write_bytes(data)
        assert main(["doctor", str(path)]) == 2
        told = capsys.readouterr().err
        assert words in told
        assert str(path) in told


def test_folders_that_are_no_bundle_are_refused_with_a_remedy(tmp_path, recorder):
    path = bundle(tmp_path, recorder, STUCK)
    for folder, words in (
        (path.parent, f"a folder of 1 bundles; give one of them, e.g. {path}"),
        (tmp_path / "nowhere", "No such file or directory; give a bundle's folder"),
    ):
        with pytest.raises(EvidenceError, match=re.escape(words)):
            open_evidence(folder)
    (path / "recorder.bin").unlink()
    with pytest.raises(EvidenceError, match=r"no recorder\.bin in it"):
        open_evidence(path)


@pytest.mark.parametrize("name", ["verdict.json", "about.json"])
def test_a_bundle_that_lost_a_file_is_read_all_the_same(capsys, tmp_path, recorder, name):
    path = bundle(tmp_path, recorder, STUCK)
    for damage in (lambda file: file.write_text("{"), lambda file: file.unlink()):
        damage(path / name)
        assert "Last steps" in said(capsys, str(path))
