"""Start a gateway, prefill and decode engines on this machine, on loopback and free ports, and keep them running.
A service that dies is started again; Ctrl-C stops everything, a second one at once."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from sluice_cli.default_model import default_model
from sluice_cli.place import PortTaken, UnusableHost, evidence_directory, reserved_port, run_directory, usable_host
from sluice_cli.stack import Stack, StackSpec
from sluice_engine.model.errors import ModelError
from sluice_engine.spec import resolve
from sluice_gateway.http.origins import OriginError, check_origins
from sluice_protocol.engine_spec import EngineSpec
from sluice_protocol.generate import Role
from sluice_runtime.descriptors import raise_limit
from sluice_runtime.errors import SpecError
from sluice_runtime.process.outlet import heard_or_not

NEEDED = ("grpc", "google.protobuf", "uvloop", "fastapi", "uvicorn", "httptools", "orjson", "tokenizers")
NEEDED_FOR_A_MODEL = ("torch", "safetensors")


class UpError(Exception):
    """What was asked for cannot be; the message says which option, and what would do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="directory of a DeepSeek-V4 checkpoint with tokenizer.json")
    parser.add_argument("--name", default="", help="what clients call the model; default: the directory's name")
    parser.add_argument("--prefill", type=int, default=1, metavar="N", help="prefill engines")
    parser.add_argument("--decode", type=int, default=1, metavar="N", help="decode engines")
    parser.add_argument("--unified", action="store_true", help="one engine that does both, no handoff")
    parser.add_argument("--port", type=int, default=0, help="of the gateway; default: 8000, or a free one")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="of this machine, where the gateway answers; 0.0.0.0: every IPv4 address, for everybody who reaches it",
    )
    parser.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="of web pages that may call the gateway from a browser, such as http://localhost:3000; may be repeated;"
        " *: every page, on loopback only",
    )
    parser.add_argument("--page-tokens", type=int, default=0, help="a multiple of the model's compress rates")
    parser.add_argument("--precision", default="", metavar="KV[/INDEX]", help="of the cache; default: as the weights")
    parser.add_argument("--chunk-tokens", type=int, default=0, help="prefill chunk; default: four pages")
    parser.add_argument("--max-running", type=int, default=32, help="sequences at once per engine")
    parser.add_argument(
        "--max-context-tokens", type=int, default=0, help="default: the model's own limit, at most 8192"
    )
    parser.add_argument("--memory-mib", type=int, default=0, help="of one engine's record pools; default: at most 512")
    parser.add_argument("--transport", choices=("nixl", "stream"), default="nixl", help="stream: gRPC bytes, no NIXL")
    parser.add_argument("--verify", choices=("full", "sample"), default="full", help="digests of pulled records")
    parser.add_argument(
        "--lockstep", action="store_true", help="plan a step when the one before is done, not meanwhile"
    )
    parser.add_argument("--scripted", action="store_true", help="no model: scripted tokens, for load tests")
    parser.add_argument("--api-keys-file", type=Path, help="one key per line; default: everybody on this machine")
    parser.add_argument("--ask-sample", action="store_true", help="ask the README's question once all is up")
    parser.add_argument(
        "--wedge-floor-s", type=float, default=30.0, metavar="S", help="nothing is called wedged earlier than this"
    )
    parser.add_argument(
        "--quarantine-s", type=float, default=0.0, metavar="S",
        help="after 3 incidents within 10 minutes a service stays down for so long, to be looked at; default: never",
    )  # fmt: skip
    parser.add_argument("--verbose", action="store_true", help="show what the services write to stderr")


def run(args: argparse.Namespace) -> int:
    """2: what was asked for cannot be. 1: it failed. 0: it was stopped."""
    try:
        spec = read_arguments(args)
        check_installed(spec)
        check_model(spec)
        host = usable_host(args.host)
        check_origins(args.cors_origin, host)
    except (UpError, FileNotFoundError, UnusableHost, OriginError) as error:
        print(f"sluice up: {error}", file=sys.stderr)
        return 2
    try:
        with reserved_port(args.port, host) as port, run_directory() as directory, _evidence() as evidence:
            stack = Stack(replace(spec, evidence=evidence, host=host), port, directory)
            raise_limit()
            # Whoever reads what we say may stop, or go: what we serve, restart and look after goes on.
            with heard_or_not():
                return asyncio.run(stack.run())
    except PortTaken as error:
        print(f"sluice up: {error}", file=sys.stderr)
        return 1


@contextlib.contextmanager
def _evidence() -> Iterator[Path | None]:
    """Serving does not depend on it: a home that cannot be written to is said, and None."""
    with contextlib.ExitStack() as held:
        try:
            directory: Path | None = held.enter_context(evidence_directory())
        except OSError as error:
            print(f"sluice up: evidence of incidents will end with this command: {error}", file=sys.stderr)
            directory = None
        yield directory


def read_arguments(args: argparse.Namespace) -> StackSpec:
    """Raises UpError, or FileNotFoundError when the default model is not there."""
    if args.prefill < 1 or args.decode < 1:
        raise UpError("--prefill and --decode must be at least 1 (or give --unified)")
    if args.max_running < 1:
        raise UpError(f"--max-running is {args.max_running}; give at least 1")
    if not args.wedge_floor_s > 0:
        raise UpError(f"--wedge-floor-s is {args.wedge_floor_s:g}; give seconds above 0")
    if not args.quarantine_s >= 0:
        raise UpError(f"--quarantine-s is {args.quarantine_s:g}; give seconds, or leave it out")
    for name in ("page_tokens", "chunk_tokens", "max_context_tokens", "memory_mib"):
        if getattr(args, name) < 0:
            raise UpError(
                f"--{name.replace('_', '-')} is {getattr(args, name)}; give a positive number, or leave it out"
            )
    model = None if args.scripted else (args.model or default_model()).resolve()
    return StackSpec(
        model=model,
        name=args.name or (model.name if model is not None else "scripted"),
        roles=((Role.UNIFIED, 1),) if args.unified else ((Role.PREFILL, args.prefill), (Role.DECODE, args.decode)),
        engine={
            "page_tokens": args.page_tokens,
            "precision": args.precision,
            "chunk_tokens": args.chunk_tokens,
            "max_running": args.max_running,
            "max_context_tokens": args.max_context_tokens,
            "memory_bytes": args.memory_mib << 20,
            "transport": args.transport,
            "verify": args.verify,
            "lockstep": args.lockstep,
        },
        api_keys_file=args.api_keys_file,
        api_key="" if args.api_keys_file is None else _first_key(args.api_keys_file),
        cors_origins=tuple(args.cors_origin),
        ask_sample=args.ask_sample,
        verbose=args.verbose,
        health={"floor_s": args.wedge_floor_s, "quarantine_s": args.quarantine_s},
    )


def check_installed(spec: StackSpec) -> None:
    needed = NEEDED if spec.model is None else (*NEEDED, *NEEDED_FOR_A_MODEL)
    missing = [name for name in needed if not _is_installed(name)]
    if missing:
        told = ", ".join(missing)
        raise UpError(f"{told} not installed here: pip install 'sluice-serve[gateway,engine]', or `make setup`")


def check_model(spec: StackSpec) -> None:
    """All that an engine would refuse before it loads a weight, and what a gateway would of its tokenizer without
    loading it, said before anything is started."""
    if spec.model is not None:
        if not (spec.model / "config.json").exists():
            raise UpError(f"--model {spec.model}: no config.json there; give the directory of a checkpoint")
        if not (spec.model / "tokenizer.json").exists():
            raise UpError(f"--model {spec.model}: no tokenizer.json there; copy the one that came with the checkpoint")
        if not any(spec.model.glob("*.safetensors")):
            raise UpError(f"--model {spec.model}: no *.safetensors there; weights in other formats are not read")
        _check_texts(spec.model)
    try:
        role = spec.roles[0][0]
        resolve(msgspec.convert(spec.engine_spec(role, "check", Path("/"), "none"), EngineSpec))
    except ModelError as error:
        raise UpError(f"--model {spec.model}: {error}") from error
    except SpecError as error:
        raise UpError(f"{_option(str(error), spec)}{error}") from error


def _check_texts(model: Path) -> None:
    from sluice_gateway.settings import sampling_defaults  # orjson, which check_installed has looked for
    from sluice_gateway.text.tokenizer_files import TokenizerError, check_files, read_config

    generation = model / "generation_config.json"
    try:
        check_files(model)
        sampling_defaults(read_config(generation), str(generation))
    except (TokenizerError, ValueError) as error:
        raise UpError(f"--model {model}: {error}") from error


def _option(problem: str, spec: StackSpec) -> str:
    """The option behind the first field of an engine's spec that `problem` speaks of."""
    named = [(problem.find(name), name) for name in spec.engine if name in problem]
    if not named:
        return ""
    return f"--{min(named)[1].replace('_bytes', '_mib').replace('_', '-')}: "


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a parent package
        return False


def _first_key(path: Path) -> str:
    try:
        keys = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise UpError(f"--api-keys-file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UpError(
            f"--api-keys-file {path}: not UTF-8 text ({error.reason} at {error.start}); one key a line"
        ) from error
    if not keys:
        raise UpError(f"--api-keys-file {path}: no key in it; leave it out to let everybody in")
    return keys[0]
