"""Several `sluice up` of one machine beside each other, and what one that was killed leaves to the next."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sluice_cli import place, up
from sluice_cli.stack import StackSpec


def gateway(port: int) -> socket.socket:
    """As the gateway binds."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    sock.listen()
    return sock


@pytest.fixture
def usual(monkeypatch):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    monkeypatch.setattr(place, "USUAL_PORT", port)
    return port


def test_one_gets_the_usual_port_and_the_others_one_each(usual):
    with place.reserved_port(0) as first, place.reserved_port(0) as second, place.reserved_port(0) as third:
        assert first == usual
        assert len({first, second, third}) == 3
        for _ in range(2):  # the gateways, and those started again
            listening = [gateway(port) for port in (first, second, third)]
            for sock in listening:
                sock.close()
    with place.reserved_port(0) as again:
        assert again == usual


def test_evidence_of_two_that_run_together_lies_apart_and_the_next_one_finds_the_place_again(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with place.evidence_directory() as first, place.evidence_directory() as second:
        assert (first.name, second.name) == ("evidence", "evidence-2")
        assert first.parent == tmp_path / "sluice"
        assert [path.stat().st_mode & 0o077 for path in (first, second)] == [0, 0]
        (first / "kept").touch()
    with place.evidence_directory() as again:
        assert (again / "kept").exists()


def test_without_a_place_for_evidence_it_serves_and_says_so(monkeypatch, tmp_path, capsys):
    (tmp_path / "sluice").write_text("a file where a folder should be")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with up._evidence() as directory:
        assert directory is None
    assert "evidence of incidents will end with this command" in capsys.readouterr().err
    spec = StackSpec(None, "m", (), {}, evidence=directory)
    assert spec.health_spec("gateway")["evidence_dir"] == ""


def test_a_port_that_is_asked_for_is_given_once(usual):
    with place.reserved_port(usual):
        with pytest.raises(place.PortTaken, match=f"--port {usual}: Address already in use"):
            with place.reserved_port(usual):
                pass


def test_the_usual_port_is_free_again_at_once_after_a_busy_gateway(usual):
    """Connections that it closed first stay in TIME_WAIT."""
    with place.reserved_port(0):
        listening = gateway(usual)
        client = socket.create_connection(("127.0.0.1", usual))
        accepted, _ = listening.accept()
        accepted.close()
        assert client.recv(1) == b""
        client.close()
        listening.close()
    with place.reserved_port(0) as port:
        assert port == usual


RESERVE = """
import sys
from sluice_cli import place
place.USUAL_PORT = int(sys.argv[1])
print("here", flush=True)
sys.stdin.readline()
with place.reserved_port(0) as port:
    print(port, flush=True)
    sys.stdin.readline()
"""


def python(script: str, *argv: object) -> subprocess.Popen[str]:
    argv = (sys.executable, "-c", script, *map(str, argv))
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_several_at_once(usual):
    processes = [python(RESERVE, usual) for _ in range(4)]
    for process in processes:
        assert process.stdout.readline() == "here\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    ports = [int(process.stdout.readline()) for process in processes]
    for process in processes:
        process.communicate("\n", timeout=10)
    assert len(set(ports)) == 4
    assert usual in ports


# -- run directories ---------------------------------------------------------------------------------------------------


@pytest.fixture
def base(tmp_path_factory, monkeypatch):
    directory = tmp_path_factory.mktemp("b")
    monkeypatch.setattr(place.tempfile, "tempdir", str(directory))
    monkeypatch.setattr(place, "UNIX_PATH_MAX", 500)  # pytest's own folders are long
    return directory


HOLD = """
import sys
from sluice_cli import place
place.tempfile.tempdir, place.UNIX_PATH_MAX = sys.argv[1], 500
with place.run_directory() as directory:
    (directory / "key").write_text("secret")
    print(directory, flush=True)
    sys.stdin.readline()
"""


def test_what_a_killed_one_left_is_swept_and_what_lives_is_not(base):
    holder = python(HOLD, base)
    left = Path(holder.stdout.readline().strip())
    with place.run_directory() as mine:
        assert mine != left
        assert (left / "key").exists()
    assert not mine.exists()
    holder.kill()
    holder.communicate(timeout=10)
    assert (left / "key").exists()
    with place.run_directory() as mine:
        assert not left.exists()
        assert [path.name for path in base.iterdir()] == [mine.name]
    assert list(base.iterdir()) == []


def test_what_is_not_ours_is_left_alone(base, monkeypatch):
    others = [base / "sluice-noLock00", base / "sluice-0", base / "other", base / "sluice-foreign0"]
    for other in others:
        other.mkdir()
        (other / "key").write_text("x")
    (base / "other" / "lock").touch()
    (base / "sluice-aFile000").touch()
    target = base / "target"
    target.mkdir()
    (target / "lock").touch()
    (base / "sluice-aLink000").symlink_to(target)
    before = sorted(base.iterdir())
    with place.run_directory():
        pass
    assert sorted(base.iterdir()) == before
    (base / "sluice-foreign0" / "lock").touch()
    monkeypatch.setattr(place.os, "getuid", lambda: os.geteuid() + 1)
    with place.run_directory():
        pass
    assert sorted(base.iterdir()) == before
