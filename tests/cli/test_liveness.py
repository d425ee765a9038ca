"""Who condemns whom, and after how many failures."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator

import pytest

from sluice_cli.liveness import FAILURES, look_after, problem, zygote_problem
from sluice_runtime.probe_client import NoAnswer, ask, ask_json
from sluice_runtime.probes import Answer, ProbeServer, json_answer

ALIVE = json_answer(200, {"verdict": "idle"})
WEDGED = json_answer(503, {"verdict": "wedged", "reason": "DeviceStuck", "culprit": "rank0.device"})


class Supervisor:
    """Answers /livez with what it is told to; the last answer for ever."""

    def __init__(self) -> None:
        self.answers: list[Answer] = [ALIVE]
        self.asked = 0
        self._server = ProbeServer({"GET /livez": lambda _: self._next(), "GET /text": lambda _: Answer(200, b"x")})

    def _next(self) -> Answer:
        self.asked += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    async def start(self) -> str:
        return f"http://127.0.0.1:{await self._server.start('127.0.0.1')}"

    async def stop(self) -> None:
        await self._server.stop()


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    made = Supervisor()
    yield made
    await made.stop()


async def end(writer: asyncio.StreamWriter) -> None:
    """The other side may have gone first."""
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def condemned(url: str) -> str:
    told: list[str] = []
    async with asyncio.timeout(20):
        await look_after(url, told.append, period_s=0.0)
    (why,) = told
    return why


async def test_only_failures_in_a_row_condemn(supervisor: Supervisor) -> None:
    supervisor.answers = [WEDGED, WEDGED, ALIVE, WEDGED, WEDGED, ALIVE, WEDGED]
    why = await condemned(await supervisor.start())
    assert why == (
        "its supervisor answers /livez with 503: wedged, DeviceStuck, rank0.device, "
        f"{FAILURES} times in a row"
    )  # fmt: skip
    assert supervisor.asked == 6 + FAILURES


async def test_nobody_there_condemns(supervisor: Supervisor) -> None:
    url = await supervisor.start()
    await supervisor.stop()
    assert "does not answer /livez" in await condemned(url)


async def test_one_that_accepts_and_stays_silent_does_not_answer() -> None:
    over = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionResetError):
            await reader.read()
        await end(writer)
        over.set()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await problem(url, 0.05) == f"its supervisor does not answer /livez: no answer from {url} within 0.05 s"
        await over.wait()


async def test_a_supervisor_that_lives_has_no_problem(supervisor: Supervisor) -> None:
    assert await problem(await supervisor.start()) == ""


async def test_answers_that_are_no_status_are_no_answer(supervisor: Supervisor) -> None:
    url = await supervisor.start()
    assert await ask(url, "/livez", 5.0) == (200, ALIVE.body)
    for path, words in (("/nowhere", "answered 404"), ("/text", "not JSON")):
        with pytest.raises(NoAnswer, match=words):
            await ask_json(url, path, 5.0)
    for address in ("https://127.0.0.1:1", "127.0.0.1", "http://h:port"):
        with pytest.raises(NoAnswer, match="is no"):
            await ask(address, "/", 5.0)


@pytest.mark.parametrize("words", [b"", b"SSH-2.0\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n"])
async def test_what_is_no_http_or_too_much_is_no_answer(words: bytes) -> None:
    over = asyncio.Event()

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(words)
        await end(writer)
        over.set()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    async with server:
        with pytest.raises(NoAnswer, match="does not speak HTTP"):
            await ask(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "/", 5.0)
        await over.wait()


async def test_who_cannot_ask_condemns_nobody(supervisor: Supervisor, monkeypatch, capsys, tmp_path) -> None:
    """Out of descriptors itself, `sluice up` killed every healthy service within eight seconds."""
    url = await supervisor.start()

    async def none_left(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("asyncio.open_connection", none_left)
        patch.setattr("asyncio.open_unix_connection", none_left)
        assert [await problem(url) for _ in range(FAILURES)] == [""] * FAILURES
        assert await zygote_problem(tmp_path / "zygote.sock") == ""
        with pytest.raises(NoAnswer, match="Too many open files"):
            await ask(url, "/livez", 1.0)
    assert capsys.readouterr().err.count("nobody can be looked after at the moment") == FAILURES + 1
    assert await problem(url) == ""
    assert await zygote_problem(tmp_path / "zygote.sock") != ""
