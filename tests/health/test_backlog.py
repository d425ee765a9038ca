"""Connections that nobody accepts are seen in the kernel's tables."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from sluice_engine.health import backlog
from sluice_engine.health.backlog import AcceptMarks, waiting
from sluice_engine.health.reading import Copy
from sluice_engine.health.recorder import Recorder


def test_who_waits_is_counted_and_who_is_accepted_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "LOOK_S", 0.0)
    recorder = Recorder.create(tmp_path / "recorder", ["leader.accept"])
    marks = AcceptMarks(recorder.row("leader.accept"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        marks.listen(port)
        assert waiting([port]) == 0
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        deadline = time.monotonic() + 10
        while waiting([port]) != 3:
            assert time.monotonic() < deadline
        for _ in range(5):
            marks.look()
        stuck = Copy(recorder.view).rows()["leader.accept"]
        assert (stuck.pending, stuck.progress) == (3, 0)
        for _ in clients:
            server.accept()[0].close()
        marks.look()
        free = Copy(recorder.view).rows()["leader.accept"]
        assert (free.pending, free.progress) == (0, 1)
        for client in clients:
            client.close()


def test_a_table_that_is_not_there_accuses_nobody() -> None:
    assert waiting([80], [Path("/proc/net/nothing-of-the-kind")]) == 0
