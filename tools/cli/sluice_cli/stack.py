"""What `sluice up` runs: one gateway, engines, and a zygote that all ranks are forked from."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sluice_cli import sample
from sluice_cli.http import get_json
from sluice_cli.liveness import look_after, look_after_zygote
from sluice_cli.notes import remove_note, write_note
from sluice_gateway.http.origins import is_loopback
from sluice_launch.commands import Command, engine_command, gateway_command, zygote_command
from sluice_launch.kept import Event, Service, StartFailed
from sluice_launch.place import Place
from sluice_protocol.generate import Role
from sluice_runtime.address import join

PATIENCE_S = 15.0  # say what is waited for, this often
ROUTABLE_S = 60.0
FLEET_AGAIN_S = 1.0


@dataclass(frozen=True)
class StackSpec:
    """`model` None: the scripted one. `engine`: fields of EngineSpec that all engines share. `api_key`: one that works,
    for the sample question. `health`: fields of HealthSpec that all services share. `evidence`: a folder
    that outlives the run directory; None: evidence ends with `sluice up`."""

    model: Path | None
    name: str
    roles: tuple[tuple[Role, int], ...]
    engine: dict[str, object]
    api_keys_file: Path | None = None
    api_key: str = ""
    ask_sample: bool = False
    verbose: bool = False
    health: Mapping[str, object] = field(default_factory=dict)
    evidence: Path | None = None
    host: str = "127.0.0.1"
    cors_origins: tuple[str, ...] = ()

    def engine_spec(self, role: Role, name: str, run_dir: Path, key: str) -> dict[str, object]:
        model: dict[str, object] = {"scripted": {}} if self.model is None else {"model": str(self.model)}
        named = {"role": role.value, "name": name, "run_dir": str(run_dir), "key": key}
        return {**self.engine, **model, **named, "health": self.health_spec(name)}

    def health_spec(self, name: str) -> dict[str, object]:
        return {**self.health, "evidence_dir": str(self.evidence / name) if self.evidence else ""}


class Stack:
    def __init__(self, spec: StackSpec, port: int, directory: Path) -> None:
        self.spec = spec
        self.directory = directory
        self.url = f"http://{join(near(spec.host), port)}"
        self._port = port
        self._place = Place(directory, secrets.token_hex(16))
        self._members: dict[str, tuple[str, str]] = {}  # engine that is ready -> (role, address)
        self._roles: dict[str, str] = {}  # of all engines that are wanted
        self._down: dict[str, str] = {}  # engine -> why it is not ready
        self._deaths: Counter[str] = Counter()
        self._started = time.monotonic()
        self._loading: dict[str, tuple[float, int]] = {}  # engine -> (since, quarters said)
        self._announced: dict[str, Event] = {}  # service -> what its supervisor said of itself
        self._liveness: dict[str, asyncio.Task[None]] = {}
        self._zygote_watch: list[asyncio.Task[None]] = []
        self._fleet_again: asyncio.TimerHandle | None = None
        self._is_ready = False
        self._stop = asyncio.Event()
        self._wounded = asyncio.Event()
        zygote = [] if spec.model is None else [self._zygote()]
        self._engines = [self._engine(role, index) for role, count in spec.roles for index in range(count)]
        self._layers = [[self._gateway()], self._engines, zygote]  # in the order in which they stop

    @property
    def services(self) -> list[Service]:
        return [service for layer in reversed(self._layers) for service in layer]

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup means what it says
                loop.add_signal_handler(number, self._on_signal)
        self._say(f"{self.spec.name}: starting {', '.join(service.name for service in self.services)}")
        try:
            for service in self.services:
                service.begin()
            self._zygote_watch += [self._look_after_zygote(zygote) for zygote in self._layers[-1]]
            if await self._unless_over(self._all_ready()) and await self._unless_over(self._routable()):
                await self._serve()
            return self._verdict()
        finally:
            self._say("stopping")
            for watch in (*self._liveness.values(), *self._zygote_watch):
                watch.cancel()
            for layer in self._layers:
                await asyncio.gather(*(service.stop() for service in layer))
            remove_note()

    def _on_signal(self) -> None:
        """The first asks for an orderly end, the second for a quick one."""
        if self._stop.is_set():
            for service in self.services:
                service.kill()
        self._stop.set()

    async def _unless_over(self, work: Coroutine[object, object, None]) -> bool:
        """Whether `work` came to its end before a signal or a failed start came."""
        loop = asyncio.get_running_loop()
        ends = [loop.create_task(self._stop.wait()), *(s.task for s in self.services if s.task is not None)]
        task = loop.create_task(work)
        try:
            await asyncio.wait([task, *ends], return_when=asyncio.FIRST_COMPLETED)
            if any(end.done() for end in ends):
                return False
            task.result()
            return True
        finally:
            for started in (task, ends[0]):
                started.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await started

    def _verdict(self) -> int:
        """Exit status; says why when it is not 0."""
        for service in self.services:
            if service.task is None or not service.task.done() or service.task.cancelled():
                continue
            error = service.task.exception()
            if isinstance(error, StartFailed):
                print(f"sluice up: {error}{_hint(error)}", file=sys.stderr)
                return 1
            if error is not None:
                raise error
        return 0 if self._stop.is_set() else 1

    # -- the way up ------------------------------------------------------------------------------------------------

    async def _all_ready(self) -> None:
        """Loading takes as long as it takes; who is waited for is said."""
        for service in self.services:
            while not service.ready.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PATIENCE_S):
                        await service.ready.wait()
                        break
                late = [other.name for other in self.services if not other.ready.is_set()]
                self._say(f"waiting for {', '.join(late)}")

    async def _routable(self) -> None:
        """The gateway has said Hello to a pair."""
        deadline = time.monotonic() + ROUTABLE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, ValueError):
                if (await asyncio.to_thread(get_json, self.url, "/readyz"))[0] == 200:
                    return
            await asyncio.sleep(0.05)
        self._say("the gateway still sees no usable pair")

    async def _serve(self) -> None:
        """Tell where it answers, ask the sample, and stay until the end."""
        self._is_ready = True
        self._write_note()
        self._say(f"ready: {self.url}/v1   (model {self.spec.name})")
        self._say_who_may_come()
        if "gateway" in self._announced:
            self._say(f"metrics: {self._announced['gateway']['probes']}/metrics (of the gateway; docs/metrics.md)")
        if problem := sample.problem(self.spec.model):
            self._say(problem)
        question, system = sample.question(self.spec.model)
        print(f"\n{sample.curl(self.url, self.spec.name, system, question, bool(self.spec.api_key))}\n")
        if self.spec.ask_sample and not await self._unless_over(self._ask()):
            return
        print(f"Ctrl-C stops it; `{_as_typed()} chat` talks to it.")
        await self._unless_over(self._tell_of_recoveries())

    def _say_who_may_come(self) -> None:
        spec = self.spec
        if is_loopback(spec.host):
            return
        who = "everybody with one of the API keys" if spec.api_key else "EVERYBODY"
        remedy = "" if spec.api_key else "; give --api-keys-file to ask for a key, or leave --host out"
        self._say(
            f"warning: at --host {spec.host} {who} who reaches this machine over the network can use the model, and"
            f" what is sent is not encrypted{remedy}"
        )

    def _write_note(self) -> None:
        """By which `sluice chat` and `sluice status` find us."""
        try:
            services = list(self._announced.values())
            write_note(self.url, self.spec.name, is_ready=self._is_ready, services=services)
        except OSError as error:
            if self._is_ready:
                self._say(f"`sluice chat` and `sluice status` will need --url: {error}")

    async def _tell_of_recoveries(self) -> None:
        """For ever: after deaths, when the gateway has a pair again."""
        while True:
            await self._wounded.wait()
            self._wounded.clear()
            await self._all_ready()
            await self._routable()
            if not self._wounded.is_set():
                self._say(f"serving again: {self.url}/v1")

    async def _ask(self) -> None:
        spec = self.spec
        asked = (self.url, spec.name, spec.model, self._started, spec.api_key, self._stop.is_set)
        await asyncio.to_thread(sample.ask, *asked)

    # -- services --------------------------------------------------------------------------------------------------

    def _zygote(self) -> Service:
        return self._service(zygote_command(str(self._place.zygote)))

    def _engine(self, role: Role, index: int) -> Service:
        name = f"{role.value}-{index}"
        self._roles[name] = role.value
        spec = self.spec.engine_spec(role, name, self.directory / name, self._place.key)

        def on_ready(event: Event) -> None:
            self._members[name] = (role.value, str(event["address"]))
            self._tell_fleet()

        zygote = "" if self.spec.model is None else str(self._place.zygote)
        return self._service(engine_command(spec, zygote), on_ready)

    def _gateway(self) -> Service:
        """Always on the same port, so that what was printed stays true when it is started again."""
        self._write_fleet()
        spec = self.spec
        tokenizer = "bytes" if spec.model is None else spec.model
        more = ["--listen", join(self.spec.host, self._port)]
        if spec.api_keys_file is not None:
            more += ["--api-keys-file", str(spec.api_keys_file)]
        if "floor_s" in spec.health:
            more += ["--wedge-floor-s", str(spec.health["floor_s"])]
        for origin in spec.cors_origins:
            more += ["--cors-origin", origin]
        arguments = self._place.gateway_arguments(spec.name, tokenizer, *more)
        return self._service(gateway_command(self.directory / "gateway", arguments, spec.health_spec("gateway")))

    def _service(self, command: Command, on_ready: Callable[[Event], None] = lambda event: None) -> Service:
        log = None if self.spec.verbose else self.directory / f"{command.name}.log"
        return Service(command, log, on_ready, self._on_event, self._on_death)

    def _tell_fleet(self) -> None:
        """Where there is no room for it now the gateway goes on with the last one, and it is tried again."""
        if self._fleet_again is not None:
            self._fleet_again.cancel()
        try:
            self._write_fleet()
        except OSError as error:
            if self._fleet_again is None:
                self._say(f"the gateway is not told of the engines yet: {error}")
            self._fleet_again = asyncio.get_running_loop().call_later(FLEET_AGAIN_S, self._tell_fleet)
        else:
            self._fleet_again = None

    def _write_fleet(self) -> None:
        """Raises OSError. Engines that are away stay in it, so that they are missed."""
        self._place.write_fleet(
            {"role": role, "name": name, **self._whereabouts(name)} for name, role in self._roles.items()
        )

    def _whereabouts(self, name: str) -> dict[str, str]:
        if name in self._members:
            return {"address": self._members[name][1]}
        return {"down": self._down.get(name, "it is starting")}

    # -- what a person sees ----------------------------------------------------------------------------------------

    def _on_event(self, name: str, event: Event) -> None:
        if "url" in event:
            self._say(f"{name} is ready (pid {event.get('pid')})")
            return
        match event.get("event"):
            case "supervising":
                self._look_after(name, event)
            case "incident":
                self._say(f"{name}: incident: {event.get('message')}")
            case "evidence":
                self._say(f"{name}: evidence (may hold prompts): {_as_typed()} doctor {event.get('path')}")
            case "evidence-failed":
                self._say(f"{name}: {event.get('error')}")
            case "quarantined":
                told = f"{event.get('incidents')} incidents; it stays down for {event.get('seconds')} s to be looked at"
                self._say(f"{name} is quarantined after {told}")
            case "ready":
                self._say_ready(name, event)
            case "zygote-ready":
                self._say(f"{name} is ready (pid {event.get('pid')}): torch is imported")
            case "loading":
                self._say_loading(name, int(str(event["loaded"])), int(str(event["total"])) or 1)
            case "pair" if event.get("reason"):
                why = f"{event.get('reason')}: {event.get('detail')}"
                self._say(f"{name} gets no records from {event.get('source')}: {why}")
            case "pair":
                self._say(f"{name} gets records from {event.get('source')} again")
            case "superseded":
                self._say(f"{name}: {event.get('cause')}; another one is started, and engines that run go on")
            case "condemned":
                self._say(f"{name} is being ended: {event.get('cause')}")
            case "sidecar-died":
                self._say(f"{name}: its transport sidecar died (status {event.get('status')}) and is started again")

    def _look_after(self, name: str, event: Event) -> None:
        """From now on its supervisor has to answer."""
        self._announced[name] = {key: value for key, value in event.items() if key != "event"}
        self._write_note()
        service = next(service for service in self.services if service.name == name)

        def doubt(why: str) -> None:
            self._say(f"{name}: {why}; it is ended if that stays so")

        watch = look_after(str(event["probes"]), service.condemn, doubt=doubt)
        self._liveness[name] = asyncio.get_running_loop().create_task(watch, name=f"liveness of {name}")

    def _look_after_zygote(self, zygote: Service) -> asyncio.Task[None]:
        """It has no supervisor. While it imports torch nobody expects an answer."""

        def is_needed() -> bool:
            return zygote.ready.is_set() and not all(engine.ready.is_set() for engine in self._engines)

        def replace(why: str) -> None:
            """Engines that run stay with the old one; those that wait for a rank begin again with the new one."""
            self._place.zygote.unlink(missing_ok=True)
            zygote.supersede(why)
            for engine in self._engines:
                if not engine.ready.is_set():
                    engine.condemn("its zygote does not answer")

        watch = look_after_zygote(self._place.zygote, is_needed, replace)
        return asyncio.get_running_loop().create_task(watch, name="liveness of the zygote")

    def _say_ready(self, name: str, event: Event) -> None:
        self._loading.pop(name, None)
        told = event.get("transport")
        transport = told if isinstance(told, dict) else {}
        lane = f", {transport['name']} over {transport['lane']}" if transport else ""
        self._say(f"{name} is ready (pid {event.get('pid')}{lane})")
        if transport.get("warning"):
            self._say(f"{name}: warning: {transport['warning']}")

    def _say_loading(self, name: str, loaded: int, total: int) -> None:
        """By quarters, and only when it takes long enough to wonder."""
        since, said = self._loading.setdefault(name, (time.monotonic(), 0))
        quarter = 4 * loaded // total
        if quarter > said and time.monotonic() - since > 1.0:
            self._loading[name] = since, quarter
            self._say(f"{name} loads weights: {25 * quarter} % of {total / 2**20:,.0f} MiB")

    def _on_death(self, name: str, cause: str, last_words: str) -> None:
        self._wounded.set()
        watch = self._liveness.pop(name, None)
        if watch is not None:
            watch.cancel()
        if name in self._roles:
            self._members.pop(name, None)
            self._deaths[name] += 1
            self._down[name] = f"it died ({cause}) and is started again; deaths so far: {self._deaths[name]}"
            self._tell_fleet()
        self._say(f"{name} died ({cause}); starting it again")
        if last_words:
            print(last_words, file=sys.stderr)

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._started:6.2f}s] {text}")


def near(host: str) -> str:
    """An address at which this machine itself finds what listens at `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _as_typed() -> str:
    """This command as a shell here finds it."""
    given = sys.argv[0]
    return given if Path(given).name == "sluice" and shutil.which("sluice") != given else "sluice"


def _hint(error: StartFailed) -> str:
    """The remedy, where there is one; else what it said last."""
    if "Unavailable" in error.cause or "nixl" in error.cause.lower():
        lost = "" if Path("/sys/class/net").exists() else " /sys is not mounted here, and it looks for networks there."
        return f"\n  NIXL moves the cache.{lost} `--transport stream` serves without it, slower, over gRPC."
    return f"\n{error.last_words}" if error.last_words else ""
