"""`sluice status`: services that run, are stuck, or do not answer, and no services at all."""

from __future__ import annotations

import io
import json
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psutil
import pytest
from rich.console import Console

from sluice_cli import notes
from sluice_cli.__main__ import main
from sluice_cli.status_table import render
from sluice_cli.status_words import bar, seconds
from sluice_gateway.status.view import Told, stack_view


def row(name: str, **more: Any) -> dict[str, Any]:
    base = {"name": name, "state": "running", "thread": "alive", "phase": "serving", "phase_s": 1.0, "pending": 0,
            "pending_s": None, "step": 0, "progress": 0, "doing": ""}  # fmt: skip
    return base | more


def status(name: str, **more: Any) -> dict[str, Any]:
    books = {
        "ledger": {"page": {"free": 50, "filling": 10, "live": 40, "stranded": 0}},
        "sequences": {"decoding": 3},
        "rooms": {"source": 1, "reader": 2},
        "transport": {"name": "nixl", "lane": "tcp", "lanes": "tcp,self", "bytes_per_second": 5e8, "warning": ""},
        "waiting": 1,
        "max_running": 8,
        "oldest_waiting_s": 0.5,
        "step": 4711,
    }
    return {
        "name": name, "role": "decode", "verdict": "progressing", "reason": "", "culprit": "", "doing": "",
        "age_s": 0.0, "budget_s": 0.0, "pending": 0, "started": True, "draining": False, "collecting_evidence": False,
        "quarantined": False, "maintenance_s": 0, "ready": True, "message": "progressing", "pids": {"leader": 77},
        "memory_bytes": {"leader": 64 << 20}, "rows": [row("leader.loop"), row("rank0.loop", state="absent")],
        "books": books, "books_age_s": 0.1, "transfers": {"leases": 1, "in_flight": 6, "stranded": 0}, "gateway": None,
        "events": [{"writer": "supervisor", "age_s": 3.0, "text": "readiness: ready"}],
    } | more  # fmt: skip


STUCK = {
    "verdict": "wedged",
    "reason": "SchedulerFrozen",
    "culprit": "leader.loop",
    "doing": "planning",
    "age_s": 31.0,
    "budget_s": 30.0,
    "pending": 2,
    "ready": False,
    "message": "Wedged: SchedulerFrozen: leader.loop was planning for 31.0 s of 30.0 s with 2 pending",
    "rows": [row("leader.loop", phase="planning", phase_s=31.0, pending=2, pending_s=31.0)],
}


class Supervisor(ThreadingHTTPServer):
    told: dict[str, Any]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Supervisor

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        data = json.dumps(self.server.told).encode()
        self.send_response(200 if self.path in ("/status", "/status/now") else 404)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def supervisor(monkeypatch, tmp_path) -> Iterator[Supervisor]:
    """Answers with `told`; notes are this test's own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    server = Supervisor(("127.0.0.1", 0), Handler)
    server.told = status("decode-0")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def table(view: Any, width: int = 200) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(render(view, width))
    return console.export_text()


def test_without_a_stack_it_says_what_to_do(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for argv in (["status"], ["status", "--json"]):
        assert main(argv) == 1
        told = capsys.readouterr()
        assert "no `sluice up` of yours runs on this machine. Start one with `sluice up`" in told.err
        assert told.out == ""
    notes.write_note("http://127.0.0.1:1", "m", is_ready=False)
    assert main(["status"]) == 1
    assert "has not started its services yet" in capsys.readouterr().err
    assert main(["status", "--url", "http://127.0.0.1:1"]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_json_is_one_document_and_who_does_not_answer_is_in_it(capsys, supervisor):
    services = [
        {"name": "decode-0", "role": "decode", "probes": supervisor.url, "pid": 1},
        {"name": "gateway", "role": "gateway", "probes": "http://127.0.0.1:1", "pid": 2},
    ]
    notes.write_note("http://127.0.0.1:8000", "m", is_ready=False, services=services)
    assert main(["status", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    there, gone = told["services"]
    assert (told["model"], there["state"], there["queue"]["running"]) == ("m", "ready", 2)
    assert (gone["name"], gone["state"], gone["answers"]) == ("gateway", "no answer", False)
    assert "its supervisor (pid 2) does not answer" in gone["message"]


def test_chat_does_not_take_a_stack_that_still_starts(supervisor):
    notes.write_note("http://127.0.0.1:8000", "m", is_ready=False)
    with pytest.raises(FileNotFoundError, match="still starting"):
        notes.read_note()
    notes.write_note("http://127.0.0.1:8000", "m")
    assert notes.read_note() == "http://127.0.0.1:8000"


def test_a_gateway_elsewhere_is_asked_for_its_own_view(capsys, supervisor):
    supervisor.told = {"gateway": None, **stack_view([Told("d", "decode", "http://x:1", status("decode-7"))])}
    assert main(["status", "--url", supervisor.url]) == 0
    assert "decode-7" in capsys.readouterr().out
    supervisor.told = {"error": {"message": "Incorrect API key provided."}}
    assert main(["status", "--url", supervisor.url]) == 1
    assert "Incorrect API key provided." in capsys.readouterr().err


def test_the_table_has_state_numbers_bars_threads_and_events():
    text = table(stack_view([Told("decode-0", "decode", "http://x:1", status("decode-0"))]))
    (service,) = [line for line in text.splitlines() if line.startswith("decode-0  ") and "progressing" in line]
    assert service.split() == ["decode-0", "ready", "progressing", "1", "2/8", "3", "6", "tcp", "4711", "64", "MiB"]
    (pool,) = [line for line in text.splitlines() if "page" in line]
    assert pool.count("█") == 15
    assert "40 live, 10 filling of 100" in pool
    (thread,) = [line for line in text.splitlines() if "leader.loop" in line]
    assert thread.split() == ["decode-0", "leader.loop", "77", "64", "MiB", "serving", "1.0", "s"]
    assert "rank0.loop" not in text
    assert "3.0 s ago  decode-0: supervisor: readiness: ready" in text


def test_who_is_stuck_and_who_does_not_answer_is_said_in_words():
    silent = Told("prefill-0", "prefill", "http://x:2", trouble="its supervisor (pid 9) does not answer: no answer")
    text = table(stack_view([Told("decode-0", "decode", "http://x:1", status("decode-0", **STUCK)), silent]))
    assert f"decode-0: {STUCK['message']}" in text
    assert "prefill-0: its supervisor (pid 9) does not answer: no answer" in text
    (first,) = [
        line for line in text.splitlines() if line.startswith("decode-0") and "wedged " in line and "31 s" in line
    ]
    assert first.split()[:6] == ["decode-0", "wedged", "wedged", "leader.loop", "31", "s"]


def test_a_narrow_terminal_loses_nothing_of_the_culprit():
    text = table(stack_view([Told("decode-0", "decode", "http://x:1", status("decode-0", **STUCK))]), width=80)
    assert STUCK["message"] in " ".join(text.split())
    assert text.splitlines()[1].split() == ["decode-0", "wedged", "wedged", "1", "2/8", "3", "64", "MiB"]


@pytest.mark.parametrize(
    ("states", "drawn"),
    [
        ({"free": 10}, [("", 10)]),
        ({"free": 0, "live": 10}, [("live", 10), ("", 0)]),
        ({"free": 9999, "live": 1}, [("live", 1), ("", 9)]),
        ({"free": 0, "filling": 5, "live": 5, "stranded": 1}, [("filling", 5), ("live", 4), ("stranded", 1), ("", 0)]),
        ({}, [("", 10)]),
    ],
)
def test_a_bar_shows_every_state_and_is_never_longer_than_its_place(states, drawn):
    assert bar(states, sum(states.values()), 10) == drawn


def test_ages_are_short():
    assert [seconds(value) for value in (None, 0.04, 12.3, 300, 8000)] == ["", "0.0 s", "12 s", "5 min", "2 h"]


@pytest.mark.process
@pytest.mark.timeout(170)
def test_it_works_while_everything_is_stopped(up):
    """Leader and rank of one engine, and the supervisor of another."""
    stack = up("--scripted")
    stack.wait("Ctrl-C stops it")
    prefill, decode = (psutil.Process(stack.service(f"sluice_{role}")) for role in ("prefill", "decode"))
    for process in decode.children():
        process.send_signal(signal.SIGSTOP)
    prefill.send_signal(signal.SIGSTOP)
    stuck: dict[str, Any] = {}
    for _ in range(60):
        done = stack.sluice("status", "--json")
        assert done.returncode == 0, done.stderr
        stuck = {service["name"]: service for service in json.loads(done.stdout)["services"]}
        if any(t["thread"] == "stopped" for p in stuck["decode-0"]["processes"] for t in p["threads"]):
            break
    assert stuck["gateway"]["state"] == "ready"
    assert stuck["decode-0"]["answers"] is True
    assert stuck["prefill-0"]["state"] == "no answer"
    assert f"its supervisor (pid {prefill.pid}) does not answer" in stuck["prefill-0"]["message"]
    shown = stack.sluice("status")
    assert shown.returncode == 0
    assert "stopped" in shown.stdout
    assert "prefill-0" in shown.stdout
    for process in (*decode.children(), prefill):
        process.send_signal(signal.SIGCONT)
    assert stack.interrupt() == 0
