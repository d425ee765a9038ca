"""Bundles, incidents and quarantine: what is kept of a wedge, and that keeping it can fail without harm."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sluice_runtime.health import stacks
from sluice_runtime.health.evidence import EvidenceLimits, prune, write_bundle
from sluice_runtime.health.incidents import (
    Incident,
    QuarantinePolicy,
    boot_id,
    must_quarantine,
    note_incident,
    read_incidents,
)
from sluice_runtime.health.reading import Copy
from sluice_runtime.health.recorder import Recorder, RecorderNames
from sluice_runtime.health.stacks import STACKS_SIGNAL, can_answer, collect_stacks, share_stacks
from sluice_runtime.health.verdict import Kind, Verdict

WEDGE = Verdict(Kind.WEDGED, "DeviceStuck", "rank0.device", "device", 31.0, 30.0, 4)
CHILD = """
import sys, threading, time
from pathlib import Path
from sluice_runtime.health.stacks import answer_with_stacks
answer_with_stacks(Path(sys.argv[1]), "child")
def waits_for_ever(): threading.Event().wait()
threading.Thread(target=waits_for_ever, daemon=True).start()
def spins():
    print("ready", flush=True)
    while True: pass
spins()
"""


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder.create(tmp_path / "recorder", RecorderNames(("leader.loop",)))


@pytest.fixture
def child(tmp_path: Path):
    """A process that spins in one thread and waits in another."""
    process = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()


def bundle(tmp_path: Path, recorder: Recorder, pids: dict[str, int] | None = None, **more) -> Path:
    return write_bundle(tmp_path / "evidence", tmp_path, recorder, WEDGE, pids or {}, {"spec": {"a": 1}}, **more)


def test_a_bundle_holds_recorder_verdict_stacks_and_what_the_kernel_says(tmp_path, recorder, child) -> None:
    path = bundle(tmp_path, recorder, {"child": child.pid})
    assert path.name == "incident-0001-DeviceStuck"
    assert "leader.loop" in Copy((path / "recorder.bin").read_bytes()).rows()
    told = json.loads((path / "verdict.json").read_text())
    assert (told["reason"], told["culprit"]) == ("DeviceStuck", "rank0.device")
    stacks = (path / "child.stacks").read_text()
    assert "spins" in stacks
    assert "waits_for_ever" in stacks
    assert "State:" in (path / "child.proc").read_text()
    assert json.loads((path / "about.json").read_text()) == {"spec": {"a": 1}}


def test_a_bundle_holds_the_writers_own_stacks_and_what_the_machine_is_like(tmp_path, recorder) -> None:
    path = bundle(tmp_path, recorder)
    assert "write_bundle" in (path / "supervisor.stacks").read_text()
    told = (path / "machine.txt").read_text()
    for word in ("MemAvailable", "/proc/loadavg", f"space in {tmp_path}", "cpus: "):
        assert word in told


def test_a_process_that_is_shared_answers_through_a_link(tmp_path, recorder, child) -> None:
    """The child's own folder is `tmp_path`; the bundle's service has another one."""
    run_dir = tmp_path / "service"
    run_dir.mkdir()
    share_stacks(run_dir, "child", tmp_path)
    share_stacks(run_dir, "child", tmp_path)  # started again
    assert "waits_for_ever" in collect_stacks(run_dir, {"child": child.pid}, 10.0)["child"]


def test_the_file_of_stacks_is_bounded_however_often_it_is_asked(tmp_path, child, monkeypatch) -> None:
    monkeypatch.setattr(stacks, "MAX_BYTES", 2000)
    file = tmp_path / "stacks" / "child.txt"
    longest = 0
    for _ in range(20):
        told = collect_stacks(tmp_path, {"child": child.pid}, 10.0)["child"]
        assert "waits_for_ever" in told
        assert "spins" in told
        longest = max(longest, len(told))
    assert file.stat().st_size <= 2000 + longest
    assert b"\0" not in file.read_bytes()


def test_stacks_come_also_when_another_asker_has_cut_the_file_meanwhile(tmp_path, child) -> None:
    """Several services share a zygote, and each may ask it."""
    file = tmp_path / "stacks" / "child.txt"
    with file.open("ab") as log:
        log.write(b"older\n" * 10_000)
    pauses = 0

    def cut_at_first(seconds: float) -> None:
        nonlocal pauses
        pauses += 1
        if pauses == 1:
            os.truncate(file, 0)
            os.kill(child.pid, STACKS_SIGNAL)  # what came before the cut is lost: the other asks for its own
        time.sleep(seconds)

    assert "waits_for_ever" in collect_stacks(tmp_path, {"child": child.pid}, 10.0, cut_at_first)["child"]


def test_of_a_stopped_process_it_says_so_in_place_of_stacks(tmp_path, recorder, child) -> None:
    child.send_signal(19)  # SIGSTOP
    deadline = time.monotonic() + 10
    while "T (stopped)" not in Path(f"/proc/{child.pid}/status").read_text():
        assert time.monotonic() < deadline
    path = bundle(tmp_path, recorder, {"child": child.pid})
    assert "stopped" in (path / "child.stacks").read_text()
    assert "T (stopped)" in (path / "child.proc").read_text()


def test_a_process_without_a_handler_is_not_signalled(tmp_path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not can_answer(process.pid)
        assert collect_stacks(tmp_path, {"other": process.pid}, 0.1) == {"other": ""}
        assert process.poll() is None
        process.kill()
    assert STACKS_SIGNAL


def test_of_a_process_that_is_ending_it_says_that_it_has_ended(tmp_path, recorder) -> None:
    """Its interpreter takes the handler away a moment before the end: that is no process which does not answer."""
    code = "import sys, time; sys.stdin.read(); time.sleep(0.5)"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.close()
        path = bundle(tmp_path, recorder, {"ending": process.pid})
    assert "it has ended" in (path / "ending.stacks").read_text()


def test_of_a_process_that_is_gone_the_bundle_is_whole_all_the_same(tmp_path, recorder) -> None:
    path = bundle(tmp_path, recorder, {"gone": 2**22 - 1})
    assert (path / "gone.proc").exists()
    assert "no stacks" in (path / "gone.stacks").read_text()


def test_numbers_go_on_and_the_oldest_go_first(tmp_path, recorder) -> None:
    limits = EvidenceLimits(bundles=3)
    for _ in range(5):
        bundle(tmp_path, recorder, limits=limits)
    names = sorted(path.name for path in (tmp_path / "evidence").iterdir())
    assert names == [f"incident-000{n}-DeviceStuck" for n in (3, 4, 5)]


def test_what_cannot_be_looked_at_keeps_no_bundle_from_going(tmp_path, recorder) -> None:
    """A link that leads nowhere in the oldest: it was the last bundle that ever went."""
    first = bundle(tmp_path, recorder)
    (first / "gone").symlink_to(tmp_path / "nowhere")
    for _ in range(3):
        bundle(tmp_path, recorder, limits=EvidenceLimits(bundles=2))
    assert len(list((tmp_path / "evidence").iterdir())) == 2


def test_bytes_are_bounded_but_the_newest_stays(tmp_path, recorder) -> None:
    for _ in range(3):
        bundle(tmp_path, recorder)
    prune(tmp_path / "evidence", EvidenceLimits(bundles=10, nbytes=1))
    assert [path.name for path in (tmp_path / "evidence").iterdir()] == ["incident-0003-DeviceStuck"]


def test_what_comes_last_loses_nothing_of_what_there_was_before(tmp_path, recorder, monkeypatch) -> None:
    """A read of /proc that hung, or a disk that was full by then, took recorder and verdict with it."""

    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    seen: list[Path] = []
    with monkeypatch.context() as patch:
        patch.setattr("sluice_runtime.health.evidence.describe_process", no_room)
        path = bundle(tmp_path, recorder, {"child": os.getpid()}, published=seen.append)
    assert seen == [path]
    assert "No space left on device" in (path / "PARTIAL").read_text()
    assert "leader.loop" in Copy((path / "recorder.bin").read_bytes()).rows()
    assert json.loads((path / "verdict.json").read_text())["reason"] == "DeviceStuck"
    after = bundle(tmp_path, recorder)
    assert not (after / "PARTIAL").exists()
    assert path.exists()


def test_what_hangs_last_is_behind_what_is_published(tmp_path, recorder, monkeypatch) -> None:
    over, seen = threading.Event(), queue.Queue()
    monkeypatch.setattr("sluice_runtime.health.evidence.describe_machine", lambda _: str(over.wait(60)))
    writing = threading.Thread(target=lambda: bundle(tmp_path, recorder, published=seen.put))
    writing.start()
    try:
        path = seen.get(timeout=30)
        assert (path / "PARTIAL").exists()
        assert (path / "recorder.bin").exists()
    finally:
        over.set()
        writing.join(30)
    assert not (path / "PARTIAL").exists()


def test_a_full_disk_leaves_nothing_half_done(tmp_path, recorder) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        bundle(tmp_path, recorder, reach=full)
    assert list((tmp_path / "evidence").iterdir()) == []


def test_what_somebody_put_beside_the_bundles_is_left_alone(tmp_path, recorder) -> None:
    bundle(tmp_path, recorder)
    archive = tmp_path / "evidence" / "incident-0001.tgz"
    archive.write_bytes(b"x")
    for _ in range(3):
        bundle(tmp_path, recorder, limits=EvidenceLimits(bundles=2))
    assert archive.exists()
    assert sum(path.is_dir() for path in (tmp_path / "evidence").iterdir()) == 2


def test_a_bundle_is_private_also_in_a_folder_that_is_not(tmp_path, recorder) -> None:
    (tmp_path / "evidence").mkdir(mode=0o755)
    assert bundle(tmp_path, recorder).stat().st_mode & 0o077 == 0


def test_what_a_killed_supervisor_left_unfinished_is_removed(tmp_path, recorder) -> None:
    left = tmp_path / "evidence" / ".writing-incident-0001-DeviceStuck"
    left.mkdir(parents=True)
    (left / "recorder.bin").write_bytes(b"half")
    bundle(tmp_path, recorder)
    assert not left.exists()


# -- incidents


def incident(at_s: float, boot: str = "b") -> Incident:
    return Incident(boot, at_s, "DeviceStuck", "rank0.device", "message")


@pytest.mark.parametrize(
    ("times", "now", "due"),
    [
        ([1, 2, 3], 3, True),
        ([1, 2], 2, False),
        ([1, 2, 700], 700, False),
        ([100, 400, 700], 700, True),
        ([99, 400, 700], 700, False),
    ],
)
def test_quarantine_comes_after_so_many_within_the_window(times, now, due) -> None:
    policy = QuarantinePolicy(incidents=3, window_s=600, hold_s=60)
    assert must_quarantine([incident(t) for t in times], "b", now, policy) is due


def test_another_boot_does_not_count_and_zero_turns_it_off() -> None:
    many = [incident(t) for t in range(10)]
    assert not must_quarantine(many, "another", 10, QuarantinePolicy())
    assert not must_quarantine(many, "b", 10, QuarantinePolicy(hold_s=0))


def test_incidents_survive_and_a_damaged_line_is_left_out(tmp_path) -> None:
    note_incident(tmp_path, incident(1))
    with (tmp_path / "incidents.jsonl").open("a") as file:
        file.write("not json\n{}\n")
        file.write('{"boot":"b","at_s":null,"reason":"","culprit":"","message":""}\n')
    with (tmp_path / "incidents.jsonl").open("ab") as raw:
        raw.write(b"\xff\xfe\n")
    assert note_incident(tmp_path, incident(2)) == [incident(1), incident(2)]
    assert read_incidents(tmp_path) == [incident(1), incident(2)]
    assert boot_id()
    assert [path.name for path in tmp_path.iterdir()] == ["incidents.jsonl"]
