"""A whole service on this machine, with somebody who probes it and starts again what has ended, as `sluice up` does."""

from __future__ import annotations

import contextlib
import random
import secrets
import shutil
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sluice_harness.chat import Chat
from sluice_harness.client import NoAnswer, get
from sluice_harness.prober import Prober, Probing
from sluice_harness.profiles import Profile
from sluice_harness.service import HarnessPlace, Service, spawn_engine, spawn_gateway
from sluice_launch.commands import zygote_command
from sluice_launch.process import Process, eventually

MODEL = Path(__file__).resolve().parents[3] / "models" / "recall-1m"


class Stack:
    """Use as a context manager. `health`: fields of HealthSpec for every engine."""

    def __init__(
        self, profile: Profile, health: Mapping[str, Any], probing: Probing, model: Path | None = None
    ) -> None:
        self.profile = profile
        self.health = dict(health)
        self.engines: dict[str, Service] = {}
        self.gateway: Service | None = None
        self.zygote: Process | None = None
        self.url = ""
        self.probing = probing
        self.prober: Prober
        self.key = secrets.token_hex(16)
        self._model = model or MODEL

    def __enter__(self) -> Stack:
        self.directory = Path(tempfile.mkdtemp(prefix="sluice-chaos-"))
        self.place = HarnessPlace(self.directory, self.key)
        self._port = free_port()
        self.prober = Prober(self.probing)
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.prober.close()
        services = [*([] if self.gateway is None else [self.gateway]), *self.engines.values()]
        for process in (*(service.process for service in services), self.zygote):
            if process is not None:
                process.end()
        left = [f"{service.name}: {name}" for service in services for name in service.left_behind()]
        shutil.rmtree(self.directory, ignore_errors=True)
        if left:
            raise AssertionError(f"left behind: {left}")

    @property
    def services(self) -> dict[str, Service]:
        """The gateway too."""
        return dict(self.engines) if self.gateway is None else {**self.engines, "gateway": self.gateway}

    # -- starting --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self.profile.scripted is None:
            self.start_zygote()
        names = [f"{role}-{self.profile.roles[:at].count(role)}" for at, role in enumerate(self.profile.roles)]
        for role, name in zip(self.profile.roles, names):
            self.engines[name] = self.spawn(role, name)
        for name in names:
            self.engines[name].wait_ready()
            self.watch(name)
        self.start_gateway()

    def start_zygote(self) -> None:
        self.zygote = Process(zygote_command(str(self.place.zygote)), self.directory / "zygote.log")

    def spawn(self, role: str, name: str) -> Service:
        """Started, not ready, and not in the fleet yet."""
        real = self.profile.scripted is None
        model = {"model": str(self._model)} if real else {"scripted": dict(self.profile.scripted or {})}
        more = {**model, **self.profile.spec}
        zygote = str(self.place.zygote) if real else ""
        return spawn_engine(self.place, role, name, more, self.health, zygote)

    def watch(self, name: str) -> None:
        service = self.services[name]
        self.prober.watch(name, service.probes, service.process.pid)

    def start_gateway(self) -> None:
        self.write_fleet()
        tokenizer = "bytes" if self.profile.scripted is not None else self._model
        listen = f"127.0.0.1:{self._port}"
        argv = self.place.gateway_arguments("m", tokenizer, "--listen", listen, "--shutdown-s", "2")
        self.gateway = spawn_gateway(self.place, argv, self.health)
        self.gateway.wait_ready()
        self.url = self.gateway.url
        self.watch("gateway")
        self.wait_routable()

    def wait_routable(self) -> None:
        eventually(self._is_routable, "the gateway sees a pair", 60.0)

    def _is_routable(self) -> bool:
        try:
            return get(self.url, "/readyz")[0] == 200
        except NoAnswer:
            return False

    def write_fleet(self) -> None:
        ready = (engine for engine in self.engines.values() if engine.ready is not None)
        self.place.write_fleet({"role": engine.role, "address": engine.address} for engine in ready)

    def restart(self, name: str) -> Service:
        """After its end: the same service again, ready and in the fleet."""
        gone = self.services[name]
        self.prober.forget(name)
        gone.process.end()
        if name == "gateway":
            self.start_gateway()
            return self.services[name]
        fresh = self.engines[name] = self.spawn(gone.role, name)
        fresh.wait_ready()
        self.watch(name)
        self.write_fleet()
        return fresh

    # -- using -----------------------------------------------------------------------------------------------------

    def engine(self, role: str) -> Service:
        """The first of that role."""
        return self.services[role if role == "gateway" else f"{role}-0"]

    def chat(self, text: str, max_tokens: int) -> Chat:
        return Chat(self.url, text, max_tokens)


FIRST_PORT, LAST_PORT, PORTS_TRIED = 20_000, 32_000, 100


def free_port() -> int:
    """Free a moment ago, and none of those that the system hands out by itself: a gateway that is started again must
    come back where it was."""
    for port in random.sample(range(FIRST_PORT, LAST_PORT), PORTS_TRIED):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"none of {PORTS_TRIED} ports from {FIRST_PORT} to {LAST_PORT} is free")
