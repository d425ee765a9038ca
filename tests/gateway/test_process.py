"""`python -m sluice_gateway` as a process of its own, over real gRPC to engines that live here."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from sluice_gateway.memory import Fault, MemoryClient, MemoryEngine
from sluice_gateway.routing.engine import EngineLost
from sluice_launch.commands import lone_gateway_command
from sluice_launch.process import Process
from sluice_protocol import codec
from sluice_protocol.generate import Role
from sluice_protocol.v1.engine_pb2_grpc import EngineServicer, add_EngineServicer_to_server

TEXT = "The quick brown fox jumps over the lazy dog. "
KEY = "key-of-this-run"
ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.process


class Wire(EngineServicer):
    """A MemoryEngine behind gRPC. Its death breaks the streams, as a process's does."""

    def __init__(self, engine: MemoryEngine) -> None:
        self.engine = engine
        self.client = MemoryClient(engine)

    async def _check(self, context: Any) -> None:
        if dict(context.invocation_metadata()).get("x-sluice-key") != KEY or not self.engine.alive:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no")

    async def Hello(self, request: Any, context: Any) -> Any:
        await self._check(context)
        return codec.encode_engine_hello(self.engine.hello)

    async def Load(self, request: Any, context: Any) -> Any:
        await self._check(context)
        return codec.encode_load(self.engine.load)

    async def Attach(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await self._check(context)
        try:
            async for batch in self.client.attach(request.gateway_id):
                yield codec.encode_token_batch(batch)
        except EngineLost as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    async def Generate(self, request: Any, context: Any) -> Any:
        await self._check(context)
        call = self.client.generate(codec.decode_generate_request(request))
        try:
            reply = await call.reply()
            assert reply is not None
            return codec.encode_generate_reply(reply)
        except EngineLost as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        finally:
            call.cancel()


@asynccontextmanager
async def wired(engine: MemoryEngine) -> AsyncIterator[str]:
    """The address of the engine."""
    server = grpc.aio.server()
    add_EngineServicer_to_server(Wire(engine), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    steps = asyncio.create_task(engine.run())
    try:
        yield f"127.0.0.1:{port}"
    finally:
        steps.cancel()
        await server.stop(None)


def engine(role: Role, pid: int, text: str = TEXT) -> MemoryEngine:
    data = text.encode()
    return MemoryEngine(role, lambda _prompt, position: data[position % len(data)], pid=pid)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await condition():  # noqa: ASYNC110 - the condition is read from a real process
            await asyncio.sleep(0.01)


@dataclass
class Gateway:
    url: str
    popen: subprocess.Popen[bytes]
    http: httpx.AsyncClient

    async def text(self, tokens: int = 20) -> str:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "stream": True}
        response = await self.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert lines[-1] == "[DONE]", lines[-2:]
        return "".join(json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines[:-1])

    async def ready(self, status: int = 200) -> None:
        async def is_so() -> bool:
            return (await self.http.get("/readyz")).status_code == status

        await until(is_so)


def launch(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@asynccontextmanager
async def gateway(tmp_path: Path, *arguments: str) -> AsyncIterator[Gateway]:
    """A gateway process; it must exit with 0 when it is asked to."""
    key_file = tmp_path / "key"
    key_file.write_text(KEY + "\n")
    told = ("--model-name", "m", "--tokenizer", "bytes", "--key-file", str(key_file), "--shutdown-s", "3", *arguments)
    log = Path(tempfile.mkdtemp(dir=tmp_path)) / "stderr"
    running = Process(lone_gateway_command(told), log)
    try:
        ready = await asyncio.to_thread(running.wait_ready)
        assert ready["pid"] == running.pid
        async with httpx.AsyncClient(base_url=ready["url"], timeout=60) as http:
            yield Gateway(ready["url"], running.popen, http)
        running.popen.terminate()
        assert await asyncio.to_thread(running.wait, 30) == 0
    finally:
        running.end(number=signal.SIGKILL)
        errors = log.read_text()
        assert "Traceback" not in errors, errors


async def test_a_pair_over_grpc_answers_and_the_ready_file_says_where(tmp_path: Path) -> None:
    ready_file = tmp_path / "ready"
    async with wired(engine(Role.PREFILL, 11)) as prefill, wired(engine(Role.DECODE, 21)) as decode:
        arguments = ("--prefill", prefill, "--decode", decode, "--ready-file", str(ready_file))
        async with gateway(tmp_path, *arguments) as process:
            assert json.loads(ready_file.read_text())["url"] == process.url
            await process.ready()
            assert await process.text() == TEXT[:20]
            assert await asyncio.gather(*(process.text(100) for _ in range(20))) == [(TEXT * 3)[:100]] * 20


async def test_deaths_over_grpc_are_a_pause(tmp_path: Path) -> None:
    first, second = engine(Role.UNIFIED, 1), engine(Role.UNIFIED, 2)
    async with wired(first) as one, wired(second) as two:
        async with gateway(tmp_path, "--unified", one, two) as process:
            await process.ready()
            first.faults.append(Fault("die", 5))
            second.faults.extend([Fault("preempt", 3), Fault("fail", 3, "PullFailed")])
            texts = await asyncio.gather(*(process.text(60) for _ in range(6)))
            assert set(texts) == {(TEXT * 2)[:60]}
            first.revive()

            async def both() -> bool:
                engines = (await process.http.get("/health")).json()["engines"]
                return not any(entry["trouble"] for entry in engines)

            await until(both)
            second.die()
            assert await process.text() == TEXT[:20]


async def test_the_fleet_file_moves_the_gateway_to_other_engines(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.json"

    def point_to(*addresses: str) -> None:
        document = {"members": [{"role": "unified", "address": address} for address in addresses]}
        (tmp_path / "new").write_text(json.dumps(document))
        (tmp_path / "new").rename(fleet)

    async with wired(engine(Role.UNIFIED, 1)) as old, wired(engine(Role.UNIFIED, 2, "new " * 9)) as new:
        point_to(old)
        async with gateway(tmp_path, "--fleet-file", str(fleet)) as process:
            await process.ready()
            assert await process.text() == TEXT[:20]
            point_to(new)

            async def moved() -> bool:
                report = (await process.http.get("/health")).json()
                return bool(report["ready"] and [entry["address"] for entry in report["engines"]] == [new])

            await until(moved)
            assert await process.text(4) == "new "
            fleet.write_text("{")
            await asyncio.sleep(1.0)
            assert await process.text(4) == "new "
            point_to()
            await process.ready(503)
            point_to(old, new)
            await process.ready()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_a_short_answer_finish_and_exits_with_0(tmp_path: Path, number: signal.Signals) -> None:
    slow = engine(Role.UNIFIED, 1)
    slow.step_s = 0.02
    async with wired(slow) as address, gateway(tmp_path, "--unified", address) as process:
        await process.ready()
        asked = asyncio.create_task(process.text())

        async def runs() -> bool:
            return bool(slow.running)

        await until(runs)
        os.kill(process.popen.pid, number)
        assert await asked == TEXT[:20]
        assert await asyncio.to_thread(process.popen.wait, 30) == 0


async def test_a_hanging_engine_does_not_keep_a_gateway_from_exiting(tmp_path: Path) -> None:
    stuck = engine(Role.UNIFIED, 1)
    stuck.faults.append(Fault("hang", 3))
    async with wired(stuck) as address, gateway(tmp_path, "--unified", address) as process:
        await process.ready()
        body = {"model": "m", "prompt": "x", "stream": True}
        asked = asyncio.create_task(process.http.post("/v1/completions", json=body))

        async def hangs() -> bool:
            return any(sequence.quiet for sequence in stuck.running.values())

        await until(hangs)
        process.popen.terminate()
        assert "shutting_down" in (await asked).text
        assert await asyncio.to_thread(process.popen.wait, 30) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokenizer", "/nowhere"], "tokenizer.json"),
        (["--api-keys-file", os.devnull], "holds no key"),
        (["--fleet-file", "/nowhere"], "/nowhere"),
        (["--key-file", "/nowhere"], "/nowhere"),
        (["--listen", "127.0.0.1:http"], "http"),
        (["--unified", "a:1", "--fleet-file", "x"], "exclude each other"),
    ],
)
def test_a_start_that_cannot_work_says_why(arguments: list[str], message: str) -> None:
    command = [sys.executable, "-m", "sluice_gateway", "--model-name", "m", "--tokenizer", "bytes", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_so_does_one_whose_tokenizer_the_library_does_not_read(tmp_path: Path) -> None:
    document = json.loads((ROOT / "models/recall-1m/tokenizer.json").read_text(encoding="utf-8"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(document | {"normalizer": {"type": "Foo"}}))
    test_a_start_that_cannot_work_says_why(["--tokenizer", str(tmp_path)], "tokenizer.json: normalizer cannot be used")


def test_the_gateway_imports_no_torch_no_transformers_and_nothing_of_the_engine() -> None:
    code = (
        "import sys, sluice_gateway.__main__, sluice_gateway.supervised\n"
        "foreign = {'torch', 'transformers', 'sluice_kernels', 'sluice_engine', 'nixl_cu13'}\n"
        "print(sorted(foreign & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
async def test_an_environment_of_the_gateway_extra_alone_serves_the_models(tmp_path: Path) -> None:
    environment = tmp_path / "env"
    uv = ROOT / ".tools/uv/bin/uv"
    settings = os.environ | {"UV_PROJECT_ENVIRONMENT": str(environment)}
    sync = [str(uv), "sync", "--locked", "--extra", "gateway", "--no-dev", "--python", sys.executable]
    await asyncio.to_thread(subprocess.run, sync, cwd=ROOT, env=settings, check=True, capture_output=True, timeout=110)
    python = str(environment / "bin/python")
    find = "import importlib.util as u; print([n for n in ('torch', 'transformers', 'nixl_cu13') if u.find_spec(n)])"
    found = launch([python, "-c", find])
    assert (await asyncio.to_thread(found.communicate, None, 60))[0].strip() == "[]"
    command = [python, "-m", "sluice_gateway", "--model-name", "m", "--tokenizer", "bytes"]
    popen = launch(command)
    try:
        assert popen.stdout is not None
        ready = json.loads(await asyncio.to_thread(popen.stdout.readline))
        async with httpx.AsyncClient(base_url=ready["url"], timeout=60) as http:
            assert (await http.get("/v1/models")).json()["data"][0]["id"] == "m"
        popen.terminate()
        assert await asyncio.to_thread(popen.wait, 30) == 0
    finally:
        popen.kill()
        popen.communicate()
