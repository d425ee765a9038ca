"""Real engines and a real gateway as processes on loopback. Everything started is ended, and checked to be."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import psutil

from sluice_launch.commands import engine_command, gateway_command, lone_gateway_command, zygote_command
from sluice_launch.place import Place
from sluice_launch.process import Late, Process, eventually
from sluice_protocol.generate import SCHEMA_VERSION
from sluice_protocol.v1 import engine_pb2, engine_pb2_grpc, fleet_pb2, fleet_pb2_grpc
from sluice_runtime.rpc.options import KEY_HEADER

KEY = "test-key"
DEADLINE_S = 90.0


@dataclass
class EngineProcess:
    name: str
    role: str
    process: Process
    ready: dict[str, Any]

    @property
    def address(self) -> str:
        return str(self.ready["address"])

    @property
    def supervisor(self) -> int:
        return self.process.pid

    def pid(self, what: str) -> int:
        """Of its leader, rank or transport sidecar."""
        if what == "leader":
            return int(self.ready["pid"])
        return int(self.ready["ranks"]["0"] if what == "rank" else self.ready["transport"]["pid"])

    def inspect(self) -> dict[str, Any]:
        with grpc.insecure_channel(self.address) as channel:
            stub = engine_pb2_grpc.EngineStub(channel)
            reply = stub.Inspect(engine_pb2.InspectRequest(), metadata=((KEY_HEADER, KEY),), timeout=20)
        told: dict[str, Any] = json.loads(reply.json)
        return told

    def load(self, *sources: str) -> engine_pb2.LoadReply:
        """`sources`: what a gateway says that this reader may be sent to."""
        return self._ask("Load", engine_pb2.LoadRequest(sources=sources))

    def drain(self) -> engine_pb2.DrainReply:
        return self._ask("Drain", engine_pb2.DrainRequest())

    def _ask(self, method: str, request: Any) -> Any:
        with grpc.insecure_channel(self.address) as channel:
            ask = getattr(engine_pb2_grpc.EngineStub(channel), method)
            return ask(request, metadata=((KEY_HEADER, KEY),), timeout=20)

    def probe(self, path: str) -> tuple[int, Any]:
        """Of its supervisor."""
        connection = HTTPConnection("127.0.0.1", int(self.ready["probes"]), timeout=20)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def settled(self) -> dict[str, Any]:
        """Its books once nothing is running: exact, and nothing held but by the cache."""

        def check() -> dict[str, Any] | None:
            told = self.inspect()
            idle = not told["sequences"] and not told["rooms"]["source"] and not told["rooms"]["reader"]
            return told if idle and told["streams"] == 0 else None

        told: dict[str, Any] = eventually(check, f"{self.name} settles")
        assert told["integrity"] == "exact", told
        page, state = told["ledger"]["page"], told["ledger"]["state"]
        assert page["filling"] == page["stranded"] == state["filling"] == state["live"] == 0, told
        assert page["live"] == told["cached"]["pages"], told
        return told


@dataclass
class RunningStack:
    """Start engines, then the gateway. Use as a context manager."""

    model: str = ""
    zygote: str = ""
    scripted: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    engines: dict[str, EngineProcess] = field(default_factory=dict)
    gateway: Process | None = None
    stderr: int | None = None  # of all of them
    url: str = ""
    report_address: str = ""

    def __enter__(self) -> RunningStack:
        self.directory = Path(tempfile.mkdtemp(prefix="sluice-test-"))
        self.place = Place(self.directory, KEY)
        self._all_pids: set[int] = set()
        self._spawned: list[Process] = []  # engines, also those that were never ready
        return self

    def __exit__(self, *exc: object) -> None:
        self._note_pids()
        if self.gateway is not None:
            self.gateway.end()
        for process in self._spawned:
            process.end()
        eventually(lambda: not [pid for pid in self._all_pids if psutil.pid_exists(pid)], "all processes are gone")
        shutil.rmtree(self.directory)

    def start(self, *roles: str, **spec: Any) -> list[EngineProcess]:
        """Engines named role-0, role-1, …, side by side."""
        begun = []
        for role in roles:
            name = f"{role}-{sum(e.role == role for e in self.engines.values()) + sum(r == role for r, _ in begun)}"
            begun.append((role, name))
        processes = [(role, name, self.spawn(role, name, spec)) for role, name in begun]
        for role, name, process in processes:
            self.engines[name] = EngineProcess(name, role, process, process.wait_ready())
        self._note_pids()
        return [self.engines[name] for _, name, _ in processes]

    def _program(self, role: str) -> tuple[str, ...]:
        """What runs an engine of that role; empty: the product's own."""
        return ()

    def spawn(self, role: str, name: str, more: dict[str, Any]) -> Process:
        told: dict[str, Any] = {"role": role, "name": name, "run_dir": str(self.place.run_dir(name)), "key": KEY}
        told |= {"model": self.model} if self.model else {"scripted": self.scripted}
        process = Process(engine_command(told | self.spec | more, self.zygote, self._program(role)), self.stderr)
        self._spawned.append(process)
        return process

    def spawn_zygote(self) -> Process:
        """Ready; engines that start from now on have their ranks of it."""
        self.zygote = str(self.place.zygote)
        return started_zygote(self.zygote)

    def start_gateway(self, *more: str, ready_s: float = 30.0, health: dict[str, Any] | None = None) -> str:
        """`health`: fields of HealthSpec; given, it runs under a supervisor."""
        self.write_fleet()
        arguments = self.place.gateway_arguments(
            "m", self.model or "bytes", "--shutdown-s", "2", "--report-listen", "127.0.0.1:0", *more
        )
        if health is None:
            command = lone_gateway_command(arguments)
        else:
            command = gateway_command(self.place.run_dir("gateway"), arguments, health)
        self.gateway = Process(command, self.stderr)
        ready = self.gateway.wait_ready()
        self.url, self.report_address = ready["url"], ready["report"]
        self._all_pids |= {self.gateway.pid, int(ready["pid"])}
        eventually(lambda: self.get("/readyz")[0] == 200, "the gateway sees a pair", ready_s)
        return self.url

    def report(self) -> fleet_pb2.ReportReply:
        """The gateway's, as the operator would get it."""
        with grpc.insecure_channel(self.report_address) as channel:
            request = fleet_pb2.ReportRequest(schema_version=SCHEMA_VERSION)
            ask = fleet_pb2_grpc.FleetStub(channel).Report
            return ask(request, metadata=((KEY_HEADER, KEY),), timeout=20)  # type: ignore[no-any-return]

    def write_fleet(self, *names: str) -> None:
        """`names`: of the engines that the gateway may see; all of them without any."""
        seen = [engine for name, engine in self.engines.items() if name in names or not names]
        self.place.write_fleet({"role": e.role, "address": e.address} for e in seen)

    def forget(self, name: str) -> int:
        """An engine that was killed: its supervisor's exit status."""
        return self.engines.pop(name).process.end()

    def get(self, path: str) -> tuple[int, Any]:
        connection = self.connect()
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, json.loads(response.read() or b"null")
        finally:
            connection.close()

    def connect(self) -> HTTPConnection:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        return HTTPConnection(parts.hostname, parts.port, timeout=DEADLINE_S)

    def chat(self, text: str, max_tokens: int = 16, **more: Any) -> ChatStream:
        return ChatStream(self.connect(), [{"role": "user", "content": text}], max_tokens, more)

    def _note_pids(self) -> None:
        for engine in self.engines.values():
            if psutil.pid_exists(engine.supervisor):
                root = psutil.Process(engine.supervisor)
                self._all_pids |= {root.pid, *(child.pid for child in root.children(recursive=True))}


class ChatStream:
    """One streamed chat, greedy. Iterate for pieces; `drop` closes the connection as a client does that goes away."""

    def __init__(
        self, connection: HTTPConnection, messages: list[dict[str, str]], max_tokens: int, more: dict[str, Any]
    ) -> None:
        body = {
            "model": "m",
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"Content-Type": "application/json", "x-sluice-route": "1"}
        self._connection = connection
        self.route: dict[str, Any] = {}
        self.usage: dict[str, Any] = {}
        self.finish = ""
        connection.request("POST", "/v1/chat/completions", json.dumps(body | more), headers)

    def __iter__(self) -> Any:
        response = self._connection.getresponse()
        assert response.status == 200, (response.status, response.read())
        for line in response:
            data = line.removeprefix(b"data: ").strip()
            if not line.startswith(b"data: ") or data == b"[DONE]":  # else a comment that keeps the connection alive
                continue
            chunk = json.loads(data)
            assert "error" not in chunk, chunk
            self.route = chunk.get("sluice") or self.route
            self.usage = chunk.get("usage") or self.usage
            for choice in chunk["choices"]:
                self.finish = choice.get("finish_reason") or self.finish
                if choice["delta"].get("content"):
                    yield choice["delta"]["content"]
        self._connection.close()

    def text(self) -> str:
        return "".join(self)

    def drop(self) -> None:
        if self._connection.sock is not None:
            self._connection.sock.shutdown(2)
        self._connection.close()


def send_signal(pid: int, sig: signal.Signals) -> None:
    os.kill(pid, sig)


def started_zygote(path: str) -> Process:
    """At that socket, ready."""
    process = Process(zygote_command(path))
    try:
        process.wait_ready()
    except Late:
        process.end()
        raise
    return process
