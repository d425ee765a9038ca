"""The flight recorder: what is stored is read, in another process and from a copy, whatever state it is in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_engine.leader.marks import LeaderMarks
from sluice_engine.supervisor.engine_kind import engine_kind
from sluice_engine.watched_rows import EngineMirror, EngineWriter, engine_rows
from sluice_gateway.status.watched_rows import GATEWAY_ROWS
from sluice_protocol.generate import Role
from sluice_runtime.health import layout
from sluice_runtime.health.layout import SUPERVISOR, Field, Phase, Readiness, State
from sluice_runtime.health.reading import Copy
from sluice_runtime.health.recorder import Recorder, RecorderError, RecorderNames, unrecorded

NAMES = RecorderNames(("leader.loop", "rank0.loop"), ("books", "leases"), ("leader",))


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder.create(tmp_path / "recorder", NAMES)


def test_a_row_is_read_as_it_was_written_through_another_mapping(recorder: Recorder) -> None:
    row = Recorder.attach(recorder.path).row("rank0.loop")
    row.begin(Phase.LOADING)
    row.enter(Phase.DEVICE)
    row.step(12)
    row.progress(11)
    row.pending(4)
    row.expect(5_000_000)
    row.count(Field.COUNT_A, 99)
    row.doing("layer 7")
    told = Copy(recorder.view).rows()["rank0.loop"]
    assert (told.state, told.pid, told.tid) == (State.RUNNING, os.getpid(), threading.get_native_id())
    assert (told.phase, told.step, told.progress, told.pending) == (Phase.DEVICE, 12, 11, 4)
    assert (told.expected_ns, told.count_a, told.doing) == (5_000_000, 99, "layer 7")
    assert 0 < told.pending_since_ns <= time.monotonic_ns()
    row.pending(5)
    assert Copy(recorder.view).rows()["rank0.loop"].pending_since_ns == told.pending_since_ns
    row.pending(0)
    assert Copy(recorder.view).rows()["rank0.loop"].pending_since_ns == 0


def test_a_row_never_written_is_absent_and_an_unknown_one_is_refused(recorder: Recorder) -> None:
    assert Copy(recorder.view).rows()["leader.loop"].state is State.ABSENT
    with pytest.raises(RecorderError, match=r"no row 'rank7\.loop'"):
        recorder.row("rank7.loop")


def test_rows_and_blobs_of_all_do_not_overlap(recorder: Recorder) -> None:
    rows = [row.name for row in (*engine_rows(Role.DECODE, "nixl", ranks=8), *GATEWAY_ROWS)]
    every = [*rows, *(f"row {number}" for number in range(layout.ROWS - len(rows)))]
    mirrors = tuple(f"mirror {number}" for number in range(layout.MIRRORS))
    writers = tuple(f"writer {number}" for number in range(1, layout.WRITERS))
    full = Recorder.create(recorder.path.with_name("full"), RecorderNames(tuple(every), mirrors, writers))
    for number, name in enumerate(every):
        row = full.row(name)
        row.begin()
        row.progress(number)
        row.doing("x" * 500)
    for mirror in mirrors:
        full.mirror(mirror, {"name": mirror, "much": "y" * (layout.MIRROR_BYTES - 40)})
    for number in range(3 * layout.STEPS):
        full.step_sent(number, bytes([number % 256]) * (layout.STEP_FRAME_BYTES + 100), b"c" * 16, 1, 1, 1)
    for writer in (SUPERVISOR, *writers):
        for number in range(3 * layout.EVENTS):
            full.event(writer, f"{writer} {number} " + "z" * 500)
    copy = Copy(bytes(full.view))
    assert [row.progress for row in copy.rows().values()] == list(range(len(every)))
    assert all(row.doing == "x" * layout.DOING_BYTES for row in copy.rows().values())
    assert all(copy.mirror(mirror).value["name"] == mirror for mirror in mirrors)
    assert [step.number for step in copy.steps()] == list(range(2 * layout.STEPS, 3 * layout.STEPS))
    assert all(step.frame == bytes([step.number % 256]) * layout.STEP_FRAME_BYTES for step in copy.steps())
    assert len(copy.events()) == layout.WRITERS * layout.EVENTS


def test_a_mirror_that_does_not_fit_is_none(recorder: Recorder) -> None:
    recorder.mirror(EngineMirror.BOOKS, "x" * layout.MIRROR_BYTES)
    assert Copy(recorder.view).mirror(EngineMirror.BOOKS).value is None


def test_a_writer_that_died_in_the_middle_of_a_mirror_leaves_none(recorder: Recorder) -> None:
    recorder.mirror(EngineMirror.BOOKS, {"fine": 1})
    numbers = recorder.view.cast("Q")
    numbers[layout.mirror_at(0) // 8] += 1
    assert Copy(recorder.view).mirror(EngineMirror.BOOKS).value is None
    recorder.mirror(EngineMirror.BOOKS, {"fine": 2})  # the next life of the writer
    assert Copy(recorder.view).mirror(EngineMirror.BOOKS).value == {"fine": 2}


def test_readiness_is_the_supervisors_word(recorder: Recorder) -> None:
    assert recorder.readiness is Readiness.STARTING
    recorder.readiness = Readiness.READY
    assert Recorder.attach(recorder.path).readiness is Readiness.READY


def test_it_survives_a_writer_that_is_killed_at_any_moment(recorder: Recorder) -> None:
    script = (
        "import sys; from pathlib import Path; from sluice_runtime.health.recorder import Recorder\n"
        "from sluice_runtime.health.layout import Phase\n"
        "r = Recorder.attach(Path(sys.argv[1])); row = r.row('leader.loop'); row.begin(Phase.SERVING); n = 0\n"
        "while True:\n"
        "    n += 1; row.tick(); row.progress(n); r.mirror('books', {'n': n, 'again': n})\n"
        "    r.event('leader', str(n))\n"
        "    r.step_sent(n, b'f' * 900, b'c' * 16, n, 1, 1)\n"
    )
    for _ in range(5):
        child = subprocess.Popen([sys.executable, "-c", script, str(recorder.path)])
        try:
            before = Copy(recorder.view).rows()["leader.loop"].progress
            deadline = time.monotonic() + 30
            while Copy(recorder.view).rows()["leader.loop"].progress in (before, 0):
                assert time.monotonic() < deadline
        finally:
            child.kill()
            child.wait(10)
        copy = Copy(bytes(recorder.view))
        told = copy.mirror(EngineMirror.BOOKS).value
        assert told is None or told["n"] == told["again"]
        assert copy.rows()["leader.loop"].state is State.RUNNING
        assert all(step.tokens == step.number and step.frame == b"f" * 900 for step in copy.steps())


@given(st.integers(0, layout.FILE_BYTES - 1), st.binary(min_size=1, max_size=200))
def test_garbage_anywhere_is_read_without_an_error_or_refused_by_name(at: int, garbage: bytes) -> None:
    data = bytearray(_image())
    data[at : at + len(garbage)] = garbage
    data = data[: layout.FILE_BYTES]
    try:
        copy = Copy(data)
    except RecorderError as error:
        told = str(error)
    else:
        told = ""
    if told:
        assert "magic and version" in told
        return
    copy.rows(), copy.steps(), copy.events()
    assert [copy.mirror(name) for name in NAMES.mirrors]


_images: list[bytes] = []


def _image() -> bytes:
    if not _images:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            recorder = Recorder.create(Path(folder) / "recorder", NAMES)
            recorder.row("leader.loop").begin(Phase.SERVING)
            recorder.mirror(EngineMirror.BOOKS, {"a": [1, 2]})
            recorder.step_sent(3, b"frame", b"chain-of-16-byte", 1, 1, 1)
            recorder.event(EngineWriter.LEADER, "hello")
            _images.append(bytes(recorder.view))
    return _images[0]


def test_foreign_and_truncated_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RecorderError, match="a flight recorder has"):
        Copy(b"too short")
    with pytest.raises(RecorderError, match="magic and version"):
        Copy(bytes(layout.FILE_BYTES))
    (tmp_path / "r").write_bytes(b"x" * 100)
    with pytest.raises(RecorderError, match="100 bytes"):
        Recorder.attach(tmp_path / "r")


def test_a_recorder_is_on_disk_before_it_is_used(tmp_path: Path) -> None:
    """A sparse file on a full disk would end its writers by SIGBUS."""
    recorder = Recorder.create(tmp_path / "recorder", NAMES)
    assert recorder.path.stat().st_blocks * 512 >= layout.FILE_BYTES


def test_text_that_is_no_unicode_is_told_all_the_same(recorder: Recorder) -> None:
    row = recorder.row("leader.loop")
    row.begin()
    row.doing("a path \udcff")
    recorder.event(EngineWriter.LEADER, "died: \udcff")
    assert Copy(recorder.view).rows()["leader.loop"].doing == "a path ?"
    assert Copy(recorder.view).events()[0].text == "died: ?"


def test_marks_cost_nothing_but_stores_where_nobody_watches() -> None:
    row = unrecorded("leader.loop")
    row.begin()
    row.tick()
    row.pending(3)
    row.doing("something")


def test_the_queue_is_idle_or_waits_and_never_starts(tmp_path):
    """It has no loop of its own: what the leader's loop is in, it is not."""
    recorder = Recorder.create(tmp_path / "recorder", engine_kind(Role.UNIFIED, "nixl").recorded)
    marks = LeaderMarks(recorder)
    marks.begin(Phase.STARTING)
    assert Copy(recorder.view).rows()["leader.queue"].phase is Phase.IDLE
    marks.waiting(head=7, admissible=2)
    assert Copy(recorder.view).rows()["leader.queue"].phase is Phase.WAITING
    marks.waiting(head=8, admissible=0)
    assert Copy(recorder.view).rows()["leader.queue"].phase is Phase.IDLE


def test_every_mirror_has_a_writer():
    """A mirror that no process writes looks to a reader of evidence as if there were nothing to report."""
    root = Path(__file__).resolve().parents[2]
    sources = [path.read_text() for folder in ("engine", "services") for path in (root / folder).rglob("*.py")]
    written = {name for text in sources for name in re.findall(r"\.mirror\((\w+|EngineMirror\.\w+), ", text)}
    assert written >= {"GATEWAY_MIRROR", "IDENTITY", *(f"EngineMirror.{mirror.name}" for mirror in EngineMirror)}
