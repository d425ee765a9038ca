"""Engines and gateways of pods that only exist in the API, as the operator and gateways meet them: real gRPC servers
for Engine/Hello, Engine/Load, Engine/Drain and Fleet/Report, one per pod whose container runs, on ports that the system
picks.

A pod's address leads nowhere; `dial` is a file that says where its servers are ("240.0.0.7:7000" -> "127.0.0.1:40123"),
which `kwok_fleet.py --dial` reads. States are plain attributes that a test may change at any time:

    with FakeFleet(client, namespace, tmp_path / "dial") as fleet, OperatorProcess(..., f"--dial={fleet.dial}"):
        fleet.on_engine = lambda engine: setattr(engine, "running", 3)    # of engines to come
        fleet.until(lambda: len(fleet.of("decode")) == 2)
        fleet.of("decode")[0].running_pages = 900
        fleet.gateways[0].for_decode, fleet.gateways[0].oldest_for_decode_ms = 5, 900
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from sluice_operator.live.cluster import KINDS
from sluice_operator.names import LABEL_DEPLOYMENT, LABEL_REVISION, LABEL_ROLE
from sluice_operator.render import ports
from sluice_protocol import codec
from sluice_protocol.fingerprint import Fingerprint
from sluice_protocol.fleet import FleetReport, Queue, RoutedEngine
from sluice_protocol.generate import Drained, EngineHello, Load, Role
from sluice_protocol.v1 import engine_pb2, engine_pb2_grpc, fleet_pb2_grpc
from sluice_runtime.rpc.options import OPTIONS

SYNC_S, SILENT_S, PAGES = 0.2, 60.0, 1000


@dataclass
class FakeEngine:
    """One life of an engine. `holds`: a drain of it does not finish by itself; see `finish`. `silent`: it accepts and
    does not answer. `fingerprint`: its revision's, unless it is said to be another's. `drains`: how often it was
    told."""

    pod: str
    deployment: str
    role: str
    revision: str
    address: str
    incarnation: str
    running: int = 0
    waiting: int = 0
    running_pages: int = 0
    reserved_pages: int = 0
    total_pages: int = PAGES
    inter_token_p95_ms: float = 0.0
    draining: bool = False
    quarantined: bool = False
    holds: bool = False
    silent: bool = False
    drains: int = 0
    keys: set[str] = field(default_factory=set)
    fingerprint: str = ""

    def drain(self) -> None:
        self.draining = True
        self.drains += 1
        if not self.holds:
            self.finish()

    def finish(self) -> None:
        """All that it has comes to its end."""
        self.running = self.waiting = self.running_pages = self.reserved_pages = 0

    def load(self) -> Load:
        left = self.running + self.waiting
        return Load(
            incarnation=self.incarnation,
            running=self.running,
            waiting=self.waiting,
            max_running=64,
            free_pages=self.total_pages - self.running_pages - self.reserved_pages,
            total_pages=self.total_pages,
            draining=self.draining,
            empty=not left,
            quarantined=self.quarantined,
            running_pages=self.running_pages,
            reserved_pages=self.reserved_pages,
        )


@dataclass
class FakeGateway:
    """`sees`: any engine at all; `blind`: pods that it does not route to. `silent`: it accepts and does not answer."""

    pod: str
    deployment: str
    running: int = 0
    queued: int = 0
    for_prefill: int = 0
    for_decode: int = 0
    oldest_for_prefill_ms: int = 0
    oldest_for_decode_ms: int = 0
    sees: bool = True
    blind: set[str] = field(default_factory=set)
    silent: bool = False
    keys: set[str] = field(default_factory=set)

    def queue(self) -> Queue:
        length = self.queued or self.for_prefill + self.for_decode
        ages = self.oldest_for_prefill_ms, self.oldest_for_decode_ms
        return Queue(length, self.for_prefill, self.for_decode, *ages)


class FakeFleet:
    """Of all ModelDeployments of a namespace. A thread of its own keeps it in step with the pods."""

    def __init__(self, client, namespace, dial):
        self.dial = dial
        self.engines: dict[str, FakeEngine] = {}
        self.gateways_by_pod: dict[str, FakeGateway] = {}
        self.on_engine = lambda engine: None
        self.on_gateway = lambda gateway: None
        self.errors: list[str] = []
        self._client, self._namespace = client, namespace
        self._lives: dict[str, tuple[str, Any, str]] = {}  # pod -> life, server, its address on loopback
        self._stop = threading.Event()
        self._turns, self._loop = 0, None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="fake fleet", daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc):
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()

    @property
    def gateways(self) -> list[FakeGateway]:
        return sorted(self.gateways_by_pod.values(), key=lambda gateway: gateway.pod)

    def of(self, role: str) -> list[FakeEngine]:
        return sorted((e for e in list(self.engines.values()) if e.role == role), key=lambda engine: engine.pod)

    def until(self, is_so, timeout_s: float = 60.0):
        """The first true value of `is_so`."""
        deadline = time.monotonic() + timeout_s
        while not (told := is_so()):
            assert time.monotonic() < deadline, (self.engines, self.gateways_by_pod, self.errors)
            time.sleep(0.05)
        return told

    def describe(self) -> str:
        """For whoever reads why a test has failed: what is served, what went wrong, where its thread is."""
        engines = [f"{e.pod} at {e.address}" + (" draining" if e.draining else "") for e in list(self.engines.values())]
        gateways = [f"{g.pod} blind to {sorted(g.blind)}" for g in self.gateways]
        where = sys._current_frames().get(self._thread.ident or 0)
        stack = "".join(traceback.format_stack(where)) if where is not None else "its thread has ended\n"
        tasks = "".join(f"{task}\n" for task in asyncio.all_tasks(self._loop)) if self._loop is not None else ""
        return f"engines {engines}\ngateways {gateways}\nerrors {self.errors[-3:]}\nturns {self._turns}\n{stack}{tasks}"

    # -- in step with the API ------------------------------------------------------------------------------------------

    async def _run(self):
        self._loop = asyncio.get_running_loop()
        try:
            while not self._stop.is_set():
                self._turns += 1
                try:
                    path = f"{KINDS['Pod'].path(self._namespace)}?labelSelector={LABEL_DEPLOYMENT}"
                    pods = await asyncio.to_thread(self._client.items, path)
                except Exception as error:  # the API server may be what the test breaks
                    self.errors.append(repr(error))
                else:
                    await self._follow({pod["metadata"]["name"]: pod for pod in pods if is_running(pod)})
                await asyncio.sleep(SYNC_S)
        finally:
            await self._follow({})

    async def _follow(self, pods):
        lives = {name: life_of(pod) for name, pod in pods.items()}
        for name in [name for name, (life, _, _) in self._lives.items() if lives.get(name) != life]:
            _, server, _ = self._lives.pop(name)
            self.engines.pop(name, None)
            self.gateways_by_pod.pop(name, None)
            await server.stop(0)
        for name in lives.keys() - self._lives.keys():
            server, where = await self._serve(pods[name], lives[name])
            self._lives[name] = lives[name], server, where
        told = {}
        for name, (_, _, where) in self._lives.items():
            # Read anew each time: kwok may give a pod another address while it starts, as a new sandbox would.
            address = pods[name]["status"]["podIP"]
            if (engine := self.engines.get(name)) is not None:
                engine.address = f"{address}:{ports.ENGINE}"
            told[f"{address}:{ports.CONTROL if engine is None else ports.ENGINE}"] = where
        fresh = self.dial.with_suffix(".new")
        fresh.write_text(json.dumps(told))
        fresh.replace(self.dial)

    async def _serve(self, pod, life):
        meta, address = pod["metadata"], pod["status"]["podIP"]
        labels = meta["labels"]
        name, role, deployment = meta["name"], labels[LABEL_ROLE], labels[LABEL_DEPLOYMENT]
        server = grpc.aio.server(options=OPTIONS)
        if role == "gateway":
            gateway = FakeGateway(name, deployment)
            self.on_gateway(gateway)
            fleet_pb2_grpc.add_FleetServicer_to_server(_Fleet(gateway, self), server)
            self.gateways_by_pod[name] = gateway
        else:
            revision = labels.get(LABEL_REVISION, "")
            engine = FakeEngine(name, deployment, role, revision, f"{address}:{ports.ENGINE}", life)
            engine.fingerprint = revision
            self.on_engine(engine)
            engine_pb2_grpc.add_EngineServicer_to_server(_Engine(engine), server)
            self.engines[name] = engine
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, f"127.0.0.1:{port}"


def is_running(pod) -> bool:
    """Its main container has started and runs, whatever its readiness."""
    statuses = pod.get("status", {}).get("containerStatuses", [])
    return bool(pod["status"].get("podIP")) and any(
        s.get("started") and "running" in s.get("state", {}) for s in statuses
    )


def life_of(pod) -> str:
    restarts = sum(status.get("restartCount", 0) for status in pod["status"].get("containerStatuses", []))
    return f"{pod['metadata']['uid'][:8]}.{restarts}"


def note(seen: set[str], context) -> None:
    seen.add(dict(context.invocation_metadata()).get("x-sluice-key", ""))


async def hold_if(silent: bool) -> None:
    if silent:
        await asyncio.sleep(SILENT_S)


class _Engine(engine_pb2_grpc.EngineServicer):
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    async def Hello(self, request, context):
        await hold_if(self._engine.silent)
        engine = self._engine
        told = EngineHello(
            role=Role(engine.role),
            fingerprint=Fingerprint.of({"revision": engine.fingerprint}),
            incarnation=engine.incarnation,
            max_context_tokens=1024,
            page_tokens=8,
            source_address="" if engine.role == "decode" else engine.address,
            pid=1,
            vocab_size=512,
        )
        return codec.encode_engine_hello(told)

    async def Load(self, request, context):
        note(self._engine.keys, context)
        await hold_if(self._engine.silent)
        return codec.encode_load(self._engine.load())

    async def Drain(self, request, context):
        note(self._engine.keys, context)
        await hold_if(self._engine.silent)
        self._engine.drain()
        left = self._engine.running + self._engine.waiting
        return codec.encode_drained(Drained(left, not left, 120_000))

    async def Attach(self, request, context):
        yield engine_pb2.TokenBatch()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


class _Fleet(fleet_pb2_grpc.FleetServicer):
    """It routes to whoever serves of its deployment."""

    def __init__(self, gateway: FakeGateway, fleet: FakeFleet) -> None:
        self._gateway, self._fleet = gateway, fleet

    async def Report(self, request, context):
        gateway = self._gateway
        note(gateway.keys, context)
        await hold_if(gateway.silent)
        engines = tuple(
            self._routed(engine)
            for engine in list(self._fleet.engines.values())
            if gateway.sees and engine.deployment == gateway.deployment
            if engine.pod not in gateway.blind and not engine.silent
        )
        told = FleetReport(gateway.pod, bool(engines), gateway.running, gateway.queue(), engines)
        return codec.encode_fleet_report(told)

    def _routed(self, engine: FakeEngine) -> RoutedEngine:
        trouble = "Draining" if engine.draining else "Quarantined" if engine.quarantined else ""
        return RoutedEngine(
            address=engine.address,
            role=Role(engine.role),
            fingerprint=engine.fingerprint,
            incarnation=engine.incarnation,
            ready=not trouble,
            draining=engine.draining,
            trouble=trouble,
            inter_token_p95_ms=engine.inter_token_p95_ms,
            load=engine.load(),
            load_age_ms=50,
        )
