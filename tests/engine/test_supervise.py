"""The edges of an engine's processes: who may say what on the ranks' socket, and what children may print."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import Sized
from dataclasses import replace

import pytest

from sluice_engine import wire
from sluice_engine.errors import RankFault
from sluice_engine.leader.rank_server import RankServer
from sluice_engine.rank.rank import LoadProgress, RankFailed, RankHello, RankReady, StepExecuted, encode_rank_message
from sluice_engine.spec import load_spec
from sluice_engine.step import StepResult
from sluice_engine.supervisor.arguments import own_spec
from sluice_launch.commands import engine_command
from sluice_launch.process import Process
from sluice_protocol.service_spec import LogFormat
from sluice_runtime.errors import SpecError
from sluice_runtime.process.children import Children, StderrTerms, child_events


def framed(message):
    return wire.pack(encode_rank_message(message))


class Ranks:
    """A server for two ranks, and what it told."""

    def __init__(self) -> None:
        self.results: list[StepResult] = []
        self.deaths: list[Exception] = []
        self.progress: list[object] = []
        self.server = RankServer(2, self.results.append, self.deaths.append, self.progress.append)
        self.path = ""
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(self, words: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(self.path)
        self._writers.append(writer)
        writer.write(words)
        return reader, writer

    async def refuses(self, words: bytes) -> None:
        before = self.server.refused
        reader, _ = await self.connect(words)
        try:
            assert await asyncio.wait_for(reader.read(1), 5) == b""
        except (ConnectionResetError, BrokenPipeError):
            pass
        assert self.server.refused == before + 1

    async def until(self, told: Sized) -> None:
        for _ in range(500):
            if len(told):
                return
            await asyncio.sleep(0.01)
        raise AssertionError("nothing came")

    async def until_death(self) -> RankFault:
        await self.until(self.deaths)
        assert isinstance(self.deaths[0], RankFault)
        return self.deaths[0]

    def close(self) -> None:
        self.server.close()
        for writer in self._writers:
            writer.close()


@pytest.fixture
async def ranks(tmp_path):
    made = Ranks()
    made.path = str(tmp_path / "ranks.sock")
    await made.server.start(made.path)
    yield made
    made.close()
    await asyncio.sleep(0.01)


STRANGERS = {
    "an HTTP request": b"GET / HTTP/1.1\r\nHost: engine\r\n\r\n",
    "a frame of garbage": wire.pack(b"\xc1garbage"),
    "an empty frame": wire.pack(b""),
    "a result": framed(StepExecuted(StepResult(1, 0, ()))),
    "ready before hello": framed(RankReady(1)),
    "last words of nobody": framed(RankFailed(0, "Boom", "not me")),
    "progress of nobody": framed(LoadProgress(0, 1, 2)),
    "a rank too high": framed(RankHello(2, 1)),
    "a rank below zero": framed(RankHello(-1, 1)),
    "a hello that never ends": (1 << 20).to_bytes(4, "little") + b"x" * 100_000,
}


@pytest.mark.parametrize("words", STRANGERS.values(), ids=STRANGERS.keys())
async def test_a_stranger_is_closed_and_counted_and_the_ranks_go_on(ranks, words):
    _, first = await ranks.connect(framed(RankHello(0, 10)))
    await ranks.refuses(words)
    first.write(framed(RankReady(0)))
    await ranks.connect(framed(RankHello(1, 11)) + framed(RankReady(1)))
    await asyncio.wait_for(ranks.server.wait_ready(), 5)
    assert ranks.server.pids == {0: 10, 1: 11}
    assert [link.rank for link in ranks.server.links] == [0, 1]
    assert ranks.deaths == []
    assert (ranks.progress, ranks.results) == ([], [])


async def test_a_rank_that_is_taken_is_not_given_twice(ranks):
    await ranks.connect(framed(RankHello(0, 10)) + framed(LoadProgress(0, 1, 2)))
    await ranks.until(ranks.progress)
    await ranks.refuses(framed(RankHello(0, 99)))
    assert ranks.server.pids == {0: 10}
    assert ranks.deaths == []


async def test_a_stranger_that_only_comes_and_goes(ranks):
    _, writer = await ranks.connect()
    await asyncio.sleep(0.05)
    writer.close()
    await asyncio.sleep(0.05)
    assert ranks.deaths == []


@pytest.mark.parametrize(
    "words",
    [
        wire.pack(b"\xc1"),
        b"\xff" * 8,
        framed(RankHello(1, 10)),
        framed(RankReady(0)),
        framed(RankFailed(0, "x", "")),
        framed(StepExecuted(StepResult(1, 0, ()))),
    ],
    ids=["garbage", "a length beyond all", "hello again", "ready, another", "last words, another", "result, another"],
)
async def test_a_bad_frame_of_a_registered_rank_is_its_death(ranks, words):
    await ranks.connect(framed(RankHello(1, 10)) + words)
    fault = await ranks.until_death()
    assert (fault.rank, fault.reason) == (1, "BadFrame")


async def test_the_loss_of_a_registered_rank_is_its_death(ranks):
    _, writer = await ranks.connect(framed(RankHello(1, 10)))
    writer.close()
    fault = await ranks.until_death()
    assert (fault.rank, fault.reason) == (1, "RankDead")


LONG = """
import json, sys
print("#" * 3_000_000)
print(json.dumps({"event": "died", "detail": "d" * 300_000}))
print("[1, 2]")
print("#" * 2_000_000 + json.dumps({"event": "forged"}))
print(json.dumps({"event": "last"}), end="")
"""


async def test_a_line_of_any_length_is_an_event_or_noise(capfd):
    children = Children("s", LogFormat.HUMAN, StderrTerms())
    process = await children.start("child", "-c", LONG)
    events = [event async for event in children.events("child")]
    assert [event["event"] for event in events] == ["died", "last"]
    assert len(str(events[0]["detail"])) == 300_000
    assert await process.wait() == 0
    await children.kill_all()
    noise = capfd.readouterr().err
    assert noise.count("#") == 5_000_000
    assert "[1, 2]\n" in noise


async def test_what_comes_after_the_first_event_is_not_lost():
    script = "\n".join(f"print({json.dumps(json.dumps({'event': str(number)}))})" for number in range(100))
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    await process.wait()
    seen, noise = [], []
    async for event in child_events(process, noise.append):
        seen.append(event["event"])
        break
    seen += [event["event"] async for event in child_events(process, noise.append)]
    assert seen == [str(number) for number in range(100)]


def test_a_container_adds_what_only_it_knows_to_a_spec_that_many_share(tmp_path):
    path, key = tmp_path / "spec.json", tmp_path / "key"
    path.write_text(json.dumps({"role": "decode", "name": "decode", "run_dir": str(tmp_path / "run"), "key": ""}))
    key.write_text("secret\n")
    assert own_spec(path, "", "", None)[1] == path
    with pytest.raises(SpecError, match="run"):
        own_spec(path, "pod-1", "10.0.0.1", key)
    (tmp_path / "run").mkdir()
    spec, own = own_spec(path, "pod-1", "10.0.0.1", key)
    assert (spec.name, spec.host, spec.key) == ("pod-1", "10.0.0.1", "secret")
    assert load_spec(own) == spec
    assert own.stat().st_mode & 0o777 == 0o600


@pytest.mark.process
@pytest.mark.timeout(60)
async def test_fixed_ports_are_those_that_answer(tmp_path):
    with contextlib.ExitStack() as taken:
        free = []
        for _ in range(3):
            sock = taken.enter_context(socket.socket())
            sock.bind(("127.0.0.1", 0))
            free.append(sock.getsockname()[1])
    ports = dict(zip(("engine", "source", "probe"), free))
    spec = {"role": "prefill", "name": "p", "run_dir": str(tmp_path), "scripted": {}, "transport": "stream"}
    command = engine_command({**spec, "ports": ports})
    process = Process(replace(command, argv=(*command.argv, "--name", "pod-1")))
    try:
        event = await asyncio.to_thread(process.wait_ready)
        assert event["address"] == f"127.0.0.1:{ports['engine']}"
        assert event["source_address"] == f"127.0.0.1:{ports['source']}"
        reader, writer = await asyncio.open_connection("127.0.0.1", ports["probe"])
        writer.write(b"GET /startupz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in await reader.readline()
        writer.close()
    finally:
        await asyncio.to_thread(process.end)
