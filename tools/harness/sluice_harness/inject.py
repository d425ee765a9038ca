"""Faults of the matrix, put into effect. Each returns when it is in effect, or when nothing more can be known.

`fault` of a row is one of
    signal, process          KILL or STOP to a process of the row's engine (or `zygote`, `gateway`); `alone`: in phase
                             loading, the rank that was held there goes on
    point, action, …         an order at a hook point, with fields of `sluice_faults.Order`; `waits` false: the point is
                             reached later, by what the row itself brings about; `evidence` full or stuck: no bundle
                             can be written either; `asks`: so many requests that meet it, of
                             so many `words`
    nobody                   so many requests for a source at an address that nobody holds
    signal, process, before  the same before its engine is started again (phase loading), of what is there then
    respawned                the process is killed, and the one that is started for it is stopped before it serves
    flood, connections       so many connections at once to the engine's `probes` or `leader`, again and again; or of
                             the shortest lines, into what the leader says on `stdout` or `stderr`
    overwrite                a word of the engine's recorder gets a value that it may not have: `magic` or `readiness`
    limit, process           the process may open no more file descriptors; `knocks`: so many connections come then
    deaths, process          it is killed so many times, each time that it is there again
    load                     so many processes that do nothing but compute
    storm                    so many clients that come and go, again and again
    request                  nothing is broken: the request itself is the row
    table                    judged without processes (`tables.py`)
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sluice_faults import Action, Order, place, reached, withdraw
from sluice_faults.order import parse
from sluice_harness.chat import Chat
from sluice_harness.client import ask_with_source
from sluice_harness.flood import OUTLETS, Babble, Flood
from sluice_harness.phases import Work, fresh_prompt
from sluice_harness.service import Service
from sluice_harness.stack import Stack, free_port
from sluice_launch.process import eventually, is_running, stop_process
from sluice_protocol.service_spec import RECORDER_FILE
from sluice_runtime.address import split
from sluice_runtime.health.layout import WORD, Header
from sluice_runtime.process.processes import die_with_parent

# Rather too many for the tokenizer's fast way.
MANY_WORDS = 4000


@dataclass
class Injected:
    """`at`: monotonic seconds from which on the fault was certainly in effect. `lift` takes it away; `problems`: what
    it has met until then."""

    at: float
    undo: list[Callable[[], None]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def lift(self) -> None:
        while self.undo:
            self.undo.pop()()


def inject(stack: Stack, engine: Service, fault: Mapping[str, Any], work: Work) -> Injected:
    """Raises Late when the fault does not take effect."""
    kind = next(name for name in _INJECT if name in fault)
    return _INJECT[kind](stack, engine, fault, work)


def order_of(fault: Mapping[str, Any], floor_s: float) -> Order:
    """`floors`: seconds as a multiple of the floor."""
    fields = {
        key: value
        for key, value in fault.items()
        if key not in ("point", "waits", "floors", "evidence", "asks", "words")
    }
    if "floors" in fault:
        fields["seconds"] = fault["floors"] * floor_s
    return parse(json.dumps(fields).encode(), str(fault["point"]))


def _order(stack: Stack, engine: Service, fault: Mapping[str, Any], work: Work) -> Injected:
    point = str(fault["point"])
    if "evidence" in fault:
        place(engine.faults, "supervisor.evidence", _NO_EVIDENCE[str(fault["evidence"])])
    place(engine.faults, point, order_of(fault, stack.health["floor_s"]))
    words = int(fault.get("words", MANY_WORDS))
    work.chats += [stack.chat(fresh_prompt("and I? " * words), 5) for _ in range(int(fault.get("asks", 0)))]
    if fault.get("waits", True):
        eventually(lambda: reached(engine.faults, point), f"{point} is reached")
    return Injected(time.monotonic(), [lambda: withdraw(engine.faults, point)])


_NO_EVIDENCE = {
    "full": Order(Action.RAISE, error="OSError", errno=errno.ENOSPC),
    "stuck": Order(Action.BLOCK),
}


def _signal(stack: Stack, engine: Service, fault: Mapping[str, Any], work: Work) -> Injected:
    pid = _pid_of(stack, engine, str(fault["process"]))
    if fault["signal"] == "STOP":
        stop_process(pid)
    else:
        os.kill(pid, signal.SIGKILL)
    if fault.get("alone"):
        withdraw(engine.faults, "rank.load")
    return Injected(time.monotonic(), [lambda: _continue(pid)])


def _respawned(stack: Stack, engine: Service, fault: Mapping[str, Any], work: Work) -> Injected:
    process = str(fault["respawned"])
    before = engine.pid(process)
    os.kill(before, signal.SIGKILL)
    fresh = _next_of(engine, process, before)
    stop_process(fresh)
    return Injected(time.monotonic(), [lambda: _continue(fresh)])


def _next_of(engine: Service, process: str, before: int) -> int:
    """The pid of the one that is started for `before`."""

    def found() -> int:
        pid = engine.note_pids().get(process, 0)
        return 0 if pid == before else pid

    return eventually(found, f"the next {process} starts")


def _flood(stack: Stack, engine: Service, fault: Mapping[str, Any], work: Work) -> Injected:
    if fault["flood"] in OUTLETS:
        babble = Babble(engine.pid("leader"), OUTLETS[fault["flood"]])
        eventually(lambda: babble.written > 0, "the leader's pipe takes it")
        return Injected(time.monotonic(), [babble.close])
    target = urlsplit(engine.probes if fault["flood"] == "probes" else f"//{engine.address}")
    assert target.hostname is not None
    assert target.port is not None
    flood = Flood(target.hostname, target.port, int(fault["connections"]))
    eventually(lambda: flood.opened >= int(fault["connections"]), "the flood is there")
    return Injected(time.monotonic(), [flood.close])


def _overwrite(stack: Stack, engine: Service, fault: Mapping[str, Any], work: Work) -> Injected:
    with (engine.run_dir / RECORDER_FILE).open("r+b") as file:
        file.seek(Header[str(fault["overwrite"]).upper()] * WORD)
        file.write(b"\x4d" * WORD)
    return Injected(time.monotonic())


def _continue(pid: int) -> None:
    if is_running(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _pid_of(stack: Stack, engine: Service, process: str) -> int:
    if process == "zygote":
        assert stack.zygote is not None
        return stack.zygote.pid
    return engine.pid(process)


def _limit(stack: Stack, engine: Service, fault: Mapping[str, Any], work: Work) -> Injected:
    pid = _pid_of(stack, engine, str(fault["process"]))
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    taken = [int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()]
    free = next(number for number in range(len(taken) + 1) if number not in taken)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, hard))
    host, port = split(engine.url.removeprefix("http://") if engine.role == "gateway" else engine.address)
    knocking = [socket.create_connection((host, int(port)), timeout=10) for _ in range(int(fault.get("knocks", 0)))]
    return Injected(time.monotonic(), [*(sock.close for sock in knocking), lambda: _unlimit(pid, soft, hard)])


def _unlimit(pid: int, soft: int, hard: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def _load(stack: Stack, engine: Service, fault: Mapping[str, Any], work: Work) -> Injected:
    code = f"from {die_with_parent.__module__} import die_with_parent; die_with_parent({os.getpid()})\nwhile True: pass"
    hogs = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(int(fault["load"]))]

    def end() -> None:
        for hog in hogs:
            hog.kill()
            hog.wait()

    return Injected(time.monotonic(), [end])


def _storm(stack: Stack, engine: Service, fault: Mapping[str, Any], work: Work) -> Injected:
    """Clients that go away after a moment, in whatever phase they are by then."""
    over = threading.Event()

    def blow() -> None:
        turn = 0
        while not over.is_set():
            chats = [_passer(stack, turn + at) for at in range(int(fault["storm"]))]
            over.wait(0.2)
            for chat in chats:
                chat.drop()
            for chat in chats:
                chat.wait(20)
            turn += len(chats)

    thread = threading.Thread(target=blow, name="storm", daemon=True)
    thread.start()

    def end() -> None:
        over.set()
        thread.join(60)

    return Injected(time.monotonic(), [end])


def _passer(stack: Stack, number: int) -> Chat:
    prompt = stack.profile.long_prompt if number % 3 == 0 else "passing by"
    return stack.chat(fresh_prompt(prompt), (1, 20, 300)[number % 3])


def _request(stack: Stack, engine: Service, fault: Mapping[str, Any], work: Work) -> Injected:
    if fault["request"] == "long":
        work.chats.append(stack.chat(fresh_prompt(stack.profile.long_prompt), stack.profile.long_answer))
    if fault["request"] == "huge":
        problems: list[str] = []
        asking = threading.Thread(target=_huge, args=(stack.url, problems), name="huge", daemon=True)
        asking.start()
        return Injected(time.monotonic(), [lambda: asking.join(120)], problems)
    return Injected(time.monotonic())


def _deaths(stack: Stack, engine: Service, fault: Mapping[str, Any], work: Work) -> Injected:
    process, killed = str(fault["process"]), 0
    for _ in range(int(fault["deaths"])):
        killed = _next_of(engine, process, killed)
        os.kill(killed, signal.SIGKILL)
    return Injected(time.monotonic())


def _huge(url: str, problems: list[str]) -> None:
    """What the gateway refuses for the number of its messages, and what it may not refuse for that: neither may hold up
    anybody."""
    for number in (1_000_000, 60_000):
        messages = b",".join([b'{"role":"user","content":""}'] * number)
        body = b'{"model":"m","max_tokens":1,"messages":[' + messages + b"]}"
        request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
        try:
            urllib.request.urlopen(request, timeout=120).close()
        except urllib.error.HTTPError as error:
            if error.code != 400:
                problems.append(f"{number} messages: status {error.code}")
        except OSError as error:
            problems.append(f"{number} messages: {error!r}")


def _nobody(stack: Stack, engine: Service, fault: Mapping[str, Any], work: Work) -> Injected:
    began = time.monotonic()
    for _ in range(int(fault["nobody"])):
        answer = ask_with_source(engine.address, stack.key, f"127.0.0.1:{free_port()}")
        if answer != "SourceLost":
            raise AssertionError(f"a source that nobody holds: {answer!r}")
    return Injected(began)


_INJECT: dict[str, Callable[[Stack, Service, Mapping[str, Any], Work], Injected]] = {
    "point": _order,
    "signal": _signal,
    "respawned": _respawned,
    "flood": _flood,
    "nobody": _nobody,
    "overwrite": _overwrite,
    "limit": _limit,
    "deaths": _deaths,
    "load": _load,
    "storm": _storm,
    "request": _request,
}
