"""A zygote in a process of its own against askers that misbehave: each ends its own stream, and nobody else's rank."""

from __future__ import annotations

import array
import json
import os
import select
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from sluice_engine import wire
from sluice_engine.pool import create_memory
from sluice_engine.rank.rank import RankFailed, RankHello, RankReady, decode_rank_message
from sluice_engine.spec import resolve
from sluice_launch.commands import zygote_command
from sluice_launch.process import Process
from sluice_protocol.engine_spec import EngineSpec, ScriptedSpec
from sluice_protocol.generate import Role

pytestmark = [pytest.mark.process, pytest.mark.timeout(110)]
PATIENCE_S = 20.0


class Rank:
    """What a supervisor and a leader have of one rank."""

    def __init__(self, zygote: Zygote) -> None:
        self.asker = zygote.connect()
        socket.send_fds(self.asker, [zygote.request()], [zygote.memory])
        self.answers = self.asker.makefile("rb")
        self.pid = json.loads(self.answers.readline())["pid"]
        self.link, _ = zygote.leader.accept()
        self.link.settimeout(PATIENCE_S)
        self.frames = wire.FrameSocket(self.link)
        assert self._hear() == RankHello(0, self.pid)
        assert self._hear() == RankReady(0)

    def _hear(self) -> object:
        frame = self.frames.receive()
        assert frame is not None
        return decode_rank_message(frame)

    def end(self) -> int:
        """As a leader does it: the exit status that the asker is told."""
        self.link.close()
        status: int = json.loads(self.answers.readline())["exit"]
        assert self.answers.read() == b""
        self.close()
        return status

    def close(self) -> None:
        self.answers.close()
        self.asker.close()
        self.link.close()


class Zygote:
    def __init__(self, directory: Path) -> None:
        self.path = directory / "zygote.sock"
        spec = EngineSpec(role=Role.UNIFIED, name="z", run_dir=str(directory), scripted=ScriptedSpec(), max_running=2)
        self.spec_path = directory / "spec.json"
        self.spec_path.write_bytes(msgspec.json.encode(spec))
        resolved = resolve(spec)
        self.memory = create_memory(resolved.layouts, resolved.pools, "z")
        self.leader = socket.socket(socket.AF_UNIX)
        self.leader.bind(spec.socket_path)
        self.leader.listen()
        self.leader.settimeout(PATIENCE_S)
        self.process = Process(zygote_command(str(self.path)))
        self.process.wait_ready()

    def connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(PATIENCE_S)
        sock.connect(str(self.path))
        return sock

    def request(self, **fields: object) -> bytes:
        return json.dumps({"spec": str(self.spec_path), "rank": 0, **fields}).encode() + b"\n"

    def descriptors(self) -> list[str]:
        return sorted(str(path.readlink()) for path in Path(f"/proc/{self.process.pid}/fd").iterdir())

    def close(self) -> None:
        self.process.end(number=signal.SIGKILL)
        self.leader.close()
        os.close(self.memory)


@pytest.fixture(scope="module")
def only_zygote() -> Iterator[Zygote]:
    with tempfile.TemporaryDirectory(prefix="zygote-") as directory:
        zygote = Zygote(Path(directory))
        yield zygote
        zygote.close()


@pytest.fixture
def zygote(only_zygote: Zygote) -> Iterator[Zygote]:
    """It lives, forks on and keeps no descriptor, whatever the test did; a rank that was there before outlives it."""
    before = only_zygote.descriptors()
    bystander = Rank(only_zygote)
    yield only_zygote
    assert not only_zygote.process.is_over
    Rank(only_zygote).end()
    assert bystander.end() == 0
    deadline = time.monotonic() + 5
    while only_zygote.descriptors() != before:
        assert time.monotonic() < deadline, (only_zygote.descriptors(), before)
        time.sleep(0.02)


BAD = {
    "a list": b"[]\n",
    "a number": b"7\n",
    "no JSON": b"\x00\xff{\n",
    "no spec": b'{"rank": 0}\n',
    "a rank that is none": b'{"spec": "/", "rank": [0]}\n',
    "a negative rank": b'{"spec": "/", "rank": -1}\n',
    "a spec that is no path": b'{"spec": {}, "rank": 0}\n',
    "deep nesting": b"[" * 30000 + b"\n",
    "a line without end": b"x" * 200_000,
}


@pytest.mark.parametrize("with_fd", [True, False])
@pytest.mark.parametrize("words", BAD.values(), ids=BAD.keys())
def test_a_bad_request_ends_its_own_stream(zygote, words, with_fd):
    with zygote.connect() as sock:
        try:
            sent = socket.send_fds(sock, [words], [zygote.memory]) if with_fd else 0
            sock.sendall(words[sent:])
            assert sock.recv(1) == b""
        except (BrokenPipeError, ConnectionResetError):
            pass  # it closed before it had read all


def test_a_request_without_memory(zygote):
    with zygote.connect() as sock:
        sock.sendall(zygote.request())
        assert sock.recv(1) == b""


def test_more_descriptors_than_one_are_closed(zygote):
    with zygote.connect() as sock:
        sock.sendmsg([b"[]"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [zygote.memory] * 9))])
        socket.send_fds(sock, [b"\n"], [zygote.memory])
        assert sock.recv(1) == b""


@pytest.mark.parametrize("spec", ["/nowhere/spec.json", "/proc/self/mem", "not-json", "nul\0inside"])
def test_a_spec_that_cannot_be_read_is_that_ranks_end(zygote, tmp_path, spec):
    if spec == "not-json":
        (tmp_path / spec).write_text("{")
        spec = str(tmp_path / spec)
    with zygote.connect() as sock:
        socket.send_fds(sock, [zygote.request(spec=spec)], [zygote.memory])
        told = sock.makefile("rb").read().splitlines()
    assert [*json.loads(told[0])] == ["pid"]
    assert json.loads(told[1])["exit"] > 0


def test_a_rank_whose_leader_is_not_there_ends_with_a_status(zygote, tmp_path):
    spec = msgspec.structs.replace(msgspec.json.decode(zygote.spec_path.read_bytes(), type=EngineSpec), run_dir="/none")
    (tmp_path / "spec.json").write_bytes(msgspec.json.encode(spec))
    with zygote.connect() as sock:
        socket.send_fds(sock, [zygote.request(spec=str(tmp_path / "spec.json"))], [zygote.memory])
        assert b'{"exit": 1}\n' in sock.makefile("rb").read()


def test_an_asker_that_died_right_after_it_asked(zygote):
    for _ in range(20):
        with zygote.connect() as sock:
            socket.send_fds(sock, [zygote.request()], [zygote.memory])
    zygote.leader.settimeout(0.5)
    try:
        while True:
            zygote.leader.accept()[0].close()
    except TimeoutError:
        pass
    zygote.leader.settimeout(PATIENCE_S)


def test_asker_and_rank_that_end_at_the_same_moment(zygote):
    for _ in range(20):
        rank = Rank(zygote)
        os.kill(rank.pid, 9)
        rank.close()


def test_a_silent_one_keeps_nobody_waiting(zygote):
    with zygote.connect(), zygote.connect() as half:
        half.sendall(b'{"spec"')
        started = time.monotonic()
        Rank(zygote).end()
        assert time.monotonic() - started < 2


def test_a_request_may_come_in_pieces(zygote):
    words = zygote.request()
    with zygote.connect() as sock:
        socket.send_fds(sock, [words[:5]], [zygote.memory])
        time.sleep(0.05)
        sock.sendall(words[5:-1])
        time.sleep(0.05)
        sock.sendall(words[-1:])
        assert b"pid" in sock.recv(100)
        zygote.leader.accept()[0].close()
        assert b"exit" in sock.recv(100)


def test_the_end_of_the_asker_is_the_end_of_its_rank(zygote):
    rank = Rank(zygote)
    rank.answers.close()
    rank.asker.close()
    assert rank.link.recv(1) == b""
    rank.close()


def test_last_words_are_heard_by_a_leader_that_goes_on_writing(zygote: Zygote) -> None:
    """In overlap there is always a next step: written to a socket that nobody has, it would close the leader's end
    before the words that wait there are read, and the rank would be told as dead without a reason."""
    rank = Rank(zygote)
    rank.link.sendall(wire.pack(b"no step record"))
    assert select.select([rank.link], [], [], PATIENCE_S)[0]
    for _ in range(25):
        rank.link.sendall(wire.pack(b"another"))
        time.sleep(0.02)
    assert isinstance(rank._hear(), RankFailed)
    assert rank.end() == 1
