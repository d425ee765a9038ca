"""Start a gateway, prefill and decode engines on this machine, on loopback and free ports, and keep them running.
A service that dies is started again; Ctrl-C stops everything."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sluice_cli import sample
from sluice_cli.default_model import default_model
from sluice_cli.http import get_json
from sluice_cli.services import Event, Service, StartFailed
from sluice_protocol.generate import Role

READY_S = 600.0


def state_file() -> Path:
    """Says where this user's running `sluice up` answers."""
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"{tempfile.gettempdir()}/sluice-{os.getuid()}"
    return Path(runtime) / "sluice-up.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="directory of a DeepSeek-V4 checkpoint with tokenizer.json")
    parser.add_argument("--name", default="", help="what clients call the model; default: the directory's name")
    parser.add_argument("--prefill", type=int, default=1, metavar="N", help="prefill engines")
    parser.add_argument("--decode", type=int, default=1, metavar="N", help="decode engines")
    parser.add_argument("--unified", action="store_true", help="one engine that does both, no handoff")
    parser.add_argument("--port", type=int, default=0, help="of the gateway; default: a free one")
    parser.add_argument("--page-tokens", type=int, default=0, help="a multiple of the model's compress rates")
    parser.add_argument("--precision", default="", metavar="KV[/INDEX]", help="of the cache; default: as the weights")
    parser.add_argument("--chunk-tokens", type=int, default=0, help="prefill chunk; default: four pages")
    parser.add_argument("--max-running", type=int, default=32, help="sequences at once per engine")
    parser.add_argument("--max-context-tokens", type=int, default=0)
    parser.add_argument("--memory-mib", type=int, default=0, help="of one engine's record pools")
    parser.add_argument("--transport", choices=("nixl", "stream"), default="nixl", help="stream: gRPC bytes, no NIXL")
    parser.add_argument("--verify", choices=("full", "sample"), default="full", help="digests of pulled records")
    parser.add_argument("--scripted", action="store_true", help="no model: scripted tokens, for load tests")
    parser.add_argument("--api-keys-file", type=Path, help="one key per line; default: everybody on this machine")
    parser.add_argument("--ask-sample", action="store_true", help="ask the README's question once all is up")


def run(args: argparse.Namespace) -> int:
    if args.prefill < 1 or args.decode < 1:
        print("sluice up: --prefill and --decode must be at least 1 (or give --unified)", file=sys.stderr)
        return 2
    directory = tempfile.mkdtemp(prefix="sluice-")
    try:
        model = None if args.scripted else (args.model or default_model()).resolve()
        if model is not None and not (model / "config.json").exists():
            raise FileNotFoundError(f"--model {model}: no config.json there")
        return asyncio.run(Stack(args, model, Path(directory)).run())
    except FileNotFoundError as error:
        print(f"sluice up: {error}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class Stack:
    def __init__(self, args: argparse.Namespace, model: Path | None, directory: Path) -> None:
        self.args = args
        self.model = model
        self.directory = directory
        self.name = args.name or (model.name if model is not None else "scripted")
        self.key = secrets.token_hex(16)
        self.url = ""
        self.addresses: dict[str, tuple[str, str]] = {}  # engine -> (role, address)
        self._started = time.monotonic()
        self._said: dict[str, int] = {}

    async def run(self) -> int:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(sig, stop.set)
        engines = [self._engine(role, index) for role, count in self._roles() for index in range(count)]
        zygotes = [] if self.model is None else [self._zygote()]
        gateway = self._gateway()
        services: list[Service] = []
        tasks: list[asyncio.Task[object]] = [loop.create_task(stop.wait())]
        try:
            services += [*zygotes, *engines, gateway]
            tasks += [loop.create_task(service.keep()) for service in services]
            if await self._wait(tasks, [service.ready for service in services]):
                await self._serve(tasks)
            return self._failure(tasks)
        finally:
            self._say("stopping")
            for service in reversed(services):
                await service.stop()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(OSError):
                state_file().unlink()

    async def _serve(self, tasks: list[asyncio.Task[object]]) -> None:
        """Tell where it answers, ask the sample, and stay until the end."""
        await asyncio.to_thread(self._wait_routable)
        self._publish_state()
        self._say(f"ready: {self.url}/v1   (model {self.name})")
        question, system = sample.question(self.model)
        print(f"\n  {sample.curl(self.url, self.name, system, question)}\n", flush=True)
        if self.args.ask_sample:
            await asyncio.to_thread(sample.ask, self.url, self.name, self.model, self._started)
        print("Ctrl-C stops it; `sluice chat` talks to it.", flush=True)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)

    async def _wait(self, tasks: list[asyncio.Task[object]], ready: list[asyncio.Event]) -> bool:
        """Until all are ready; False when told to stop or a first start failed."""
        waiting: asyncio.Future[Any] = asyncio.gather(*(event.wait() for event in ready))
        await asyncio.wait([*tasks, waiting], return_when=asyncio.FIRST_COMPLETED, timeout=READY_S)
        if waiting.done():
            return True
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        return False

    def _failure(self, tasks: list[asyncio.Task[object]]) -> int:
        for task in tasks[1:]:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                if not isinstance(error, StartFailed):
                    raise error
                print(f"sluice up: {error}", file=sys.stderr, flush=True)
                return 1
        return 0 if tasks[0].done() else 1

    # -- services --------------------------------------------------------------------------------------------------

    def _roles(self) -> tuple[tuple[Role, int], ...]:
        if self.args.unified:
            return ((Role.UNIFIED, 1),)
        return ((Role.PREFILL, self.args.prefill), (Role.DECODE, self.args.decode))

    def _zygote(self) -> Service:
        argv = ("-m", "sluice_engine.zygote", "--socket", str(self.directory / "zygote.sock"), "--parent")
        return self._service(
            "zygote", (*argv, str(os.getpid())), lambda event: event.get("event") == "zygote-ready", lambda event: None
        )

    def _engine(self, role: Role, index: int) -> Service:
        name = f"{role.value}-{index}"
        run_dir = self.directory / name
        run_dir.mkdir()
        args = self.args
        spec: dict[str, object] = {
            "role": role.value,
            "name": name,
            "run_dir": str(run_dir),
            "key": self.key,
            "page_tokens": args.page_tokens,
            "precision": args.precision,
            "chunk_tokens": args.chunk_tokens,
            "max_running": args.max_running,
            "max_context_tokens": args.max_context_tokens,
            "memory_bytes": args.memory_mib << 20,
            "transport": args.transport,
            "verify": args.verify,
        }
        if self.model is None:
            spec["scripted"] = {}
        else:
            spec["model"] = str(self.model)
        path = run_dir / "spec.json"
        path.write_text(json.dumps(spec))
        module = {Role.PREFILL: "sluice_prefill", Role.DECODE: "sluice_decode"}.get(role, "sluice_engine.supervise")
        argv = ["-m", module, "--spec", str(path), "--parent", str(os.getpid())]
        if self.model is not None:
            argv += ["--zygote", str(self.directory / "zygote.sock")]

        def on_ready(event: Event) -> None:
            self.addresses[name] = (role.value, str(event["address"]))
            self._write_fleet()

        return self._service(name, tuple(argv), lambda event: event.get("event") == "ready", on_ready)

    def _gateway(self) -> Service:
        key_file = self.directory / "key"
        key_file.touch(mode=0o600)
        key_file.write_text(self.key)
        self._write_fleet()
        argv = [
            *("-m", "sluice_gateway", "--listen", f"127.0.0.1:{self.args.port}", "--model-name", self.name),
            *("--tokenizer", "bytes" if self.model is None else str(self.model)),
            *("--key-file", str(key_file), "--fleet-file", str(self.directory / "fleet.json")),
        ]
        if self.args.api_keys_file is not None:
            argv += ["--api-keys-file", str(self.args.api_keys_file)]

        def on_ready(event: Event) -> None:
            self.url = str(event["url"])
            self._publish_state()

        return self._service("gateway", tuple(argv), lambda event: "url" in event, on_ready)

    def _service(self, name: str, argv: tuple[str, ...], is_ready: object, on_ready: object) -> Service:
        return Service(name, argv, is_ready, on_ready, self._on_event, self._on_restart)  # type: ignore[arg-type]

    def _write_fleet(self) -> None:
        members = [{"role": role, "address": address} for role, address in self.addresses.values()]
        path = self.directory / "fleet.json"
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps({"members": members}))
        fresh.replace(path)

    def _publish_state(self) -> None:
        path = state_file()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(json.dumps({"url": self.url, "pid": os.getpid(), "model": self.name}))

    def _wait_routable(self) -> None:
        """The gateway has said Hello to a pair."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if get_json(self.url, "/readyz")[0] == 200:
                    return
            time.sleep(0.05)
        self._say("the gateway still sees no usable pair")

    # -- what a person sees ----------------------------------------------------------------------------------------

    def _on_event(self, name: str, event: Event) -> None:
        match event.get("event"):
            case "ready":
                transport = event.get("transport")
                lane = (
                    f", {transport['name']} over {transport['lane']}"
                    if isinstance(transport, dict) and transport
                    else ""
                )
                self._say(f"{name} is ready (pid {event.get('pid')}{lane})")
                if isinstance(transport, dict) and transport.get("warning"):
                    self._say(f"{name}: warning: {transport['warning']}")
            case "loading":
                total = int(str(event["total"])) or 1
                percent = 100 * int(str(event["loaded"])) // total
                if percent // 25 > self._said.get(name, -1):
                    self._said[name] = percent // 25
                    self._say(f"{name} loads weights: {percent} %")
            case "sidecar-died":
                self._say(f"{name}: its transport sidecar died and is started again")

    def _on_restart(self, name: str, cause: str) -> None:
        if self.addresses.pop(name, None) is not None:
            self._write_fleet()
        self._say(f"{name} died ({cause}); starting it again")

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._started:6.2f}s] {text}", flush=True)
