"""`python -m sluice_gateway`: the only place that reads argv."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from uuid import uuid4

from sluice_gateway.app import create_app
from sluice_gateway.gateway import Gateway
from sluice_gateway.http.keep_alive import Pace
from sluice_gateway.http.origins import check_origins
from sluice_gateway.http.serve import listen, make_server, url_of
from sluice_gateway.http.server import serving_reports
from sluice_gateway.routing.client import grpc_factory
from sluice_gateway.routing.discover import Discovery, discovering, parse_target
from sluice_gateway.routing.fleet import Fleet, FleetError, Member
from sluice_gateway.routing.members import read_fleet
from sluice_gateway.settings import Settings, sampling_defaults
from sluice_gateway.text.encoders import Efforts, efforts_of
from sluice_gateway.text.large_requests import WorkerSpec
from sluice_gateway.text.tokenizer import load_tokenizer, tokenizer_digest
from sluice_gateway.text.tokenizer_files import TokenizerError, read_config
from sluice_protocol.fingerprint import Fingerprint
from sluice_protocol.generate import Role
from sluice_protocol.service_spec import LogFormat
from sluice_records.chain import block_keys
from sluice_runtime import fault_points, log
from sluice_runtime.address import split
from sluice_runtime.cluster_connection import SERVICE_ACCOUNT, Connection, ConnectionInvalid, from_pod
from sluice_runtime.descriptors import raise_limit
from sluice_runtime.errors import SpecError
from sluice_runtime.health.recorder import Recorder, RecorderError
from sluice_runtime.health.stacks import answer_with_stacks
from sluice_runtime.process.outlet import drop_what_nobody_reads
from sluice_runtime.process.processes import die_with_parent, give_way, settle_heap
from sluice_runtime.tls.identity import IdentityInvalid
from sluice_runtime.tls.keeper import IdentityKeeper
from sluice_runtime.tls.peers import Peer
from sluice_runtime.tracing import make_tracer

logger = logging.getLogger(__name__)

Beside = Callable[[Gateway], AbstractAsyncContextManager[object]]


# What it may be refused its start for, each with the file or the field in its words.
REFUSALS = (
    OSError,
    ValueError,
    TokenizerError,
    FleetError,
    SpecError,
    RecorderError,
    ConnectionInvalid,
    IdentityInvalid,
)
# The tokenizer of V4 takes 200 of them; the rest is what a prompt may take.
LEAST_MEMORY_MIB = 512
# A gateway that joins others is not ready before it has met a pair; where there is none, a line has to say so.
FIRST_LOOK_S = 10.0


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sluice_gateway", description="OpenAI-compatible front of a Sluice fleet")
    parser.add_argument(
        "--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="host *: every address; port 0: any"
    )
    parser.add_argument("--model-name", required=True, help="the name that clients ask for")
    parser.add_argument("--tokenizer", required=True, metavar="DIR|bytes|script", help="a model directory; see docs")
    for role in Role:
        parser.add_argument(f"--{role}", nargs="*", default=[], metavar="ADDR", help=f"engines in role {role}")
    parser.add_argument("--fleet-file", type=Path, help='JSON {"members":[{"role","address"}]}, read again on change')
    parser.add_argument(
        "--discover",
        default="",
        metavar="NAMESPACE/SERVICE[,SERVICE]",
        help="engines: what EndpointSlices say, in a pod",
    )
    parser.add_argument(
        "--service-account", type=Path, default=SERVICE_ACCOUNT, metavar="DIR", help="token, ca.crt and namespace"
    )
    parser.add_argument(
        "--report-listen", default="", metavar="HOST:PORT", help="serve Fleet/Report for the operator; port 0: any"
    )
    parser.add_argument("--key-file", type=Path, help="the per-run key that engines want to see")
    parser.add_argument("--tls-dir", type=Path, help="tls.crt, tls.key, ca.crt: engines are met over TLS, as gateway")
    parser.add_argument("--api-keys-file", type=Path, help="one key per line; without it everybody may come")
    parser.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="of web pages that may call this gateway from a browser; several: give it again; * on loopback only",
    )
    parser.add_argument("--max-queued", type=int, default=1024, metavar="N")
    parser.add_argument("--deadline-s", type=float, default=120.0, help="how long a request may wait for a place")
    parser.add_argument(
        "--outage-s", type=float, default=30.0, help="how long after its loss new requests wait for a pair"
    )
    parser.add_argument("--max-body-bytes", type=int, default=32 * 1024 * 1024)
    parser.add_argument(
        "--held-body-bytes", type=int, default=256 * 1024 * 1024, metavar="N", help="what all bodies may have together"
    )
    parser.add_argument(
        "--prompt-memory-mib", type=int, default=2048, metavar="N", help="of the process that tokenises large requests"
    )
    parser.add_argument(
        "--prompt-s", type=float, default=120.0, metavar="S", help="how long that process may take for one request"
    )
    parser.add_argument(
        "--wedge-floor-s",
        type=float,
        default=30.0,
        metavar="S",
        help="without a sign of progress for so long a stream says no more that it is alive",
    )
    parser.add_argument("--shutdown-s", type=float, default=10.0, help="how long running requests may take at the end")
    parser.add_argument("--log", type=LogFormat, choices=list(LogFormat), default=LogFormat.HUMAN)
    parser.add_argument("--otlp", default="", metavar="URL", help="where traces go; see docs/observability.md")
    parser.add_argument("--ready-file", type=Path, help="gets the line that stdout gets when ready to accept")
    parser.add_argument("--recorder", type=Path, help="flight recorder of the supervisor (sluice_gateway.supervised)")
    parser.add_argument("--supervisor", default="", metavar="URL", help="where that one answers; for the status page")
    parser.add_argument("--parent", type=int, default=0, help="end when this process ends")
    parser.add_argument("--faults", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    ways = (bool(arguments.discover), arguments.fleet_file is not None, any(getattr(arguments, r) for r in Role))
    if sum(ways) > 1:
        parser.error("--discover, --fleet-file and --prefill/--decode/--unified exclude each other")
    return arguments


def read_lines(path: Path) -> list[str]:
    """Raises OSError, ValueError."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error}") from error


def make_settings(arguments: argparse.Namespace) -> Settings:
    check_origins(arguments.cors_origin, split(arguments.listen)[0])
    members = tuple(Member(role, address) for role in Role for address in getattr(arguments, role))
    keys_file: Path | None = arguments.api_keys_file
    keys = () if keys_file is None else tuple(line.strip() for line in read_lines(keys_file))
    if keys_file is not None and not any(keys):
        raise ValueError(f"{keys_file} holds no key; leave --api-keys-file out to let everybody in")
    config = Path(arguments.tokenizer) / "generation_config.json"
    return Settings(
        model_name=arguments.model_name,
        gateway_id=uuid4().hex,
        fleet=Fleet(members) if arguments.fleet_file is None else read_fleet(arguments.fleet_file),
        fleet_file=arguments.fleet_file,
        api_keys=tuple(key for key in keys if key),
        cors_origins=tuple(arguments.cors_origin),
        max_queued=arguments.max_queued,
        deadline_s=arguments.deadline_s,
        outage_s=arguments.outage_s,
        max_body_bytes=arguments.max_body_bytes,
        held_body_bytes=arguments.held_body_bytes,
        shutdown_s=arguments.shutdown_s,
        pace=Pace(evidence_s=arguments.wedge_floor_s),
        supervisor=arguments.supervisor,
        sampling_defaults=sampling_defaults(read_config(config), str(config)),
        efforts=_efforts(arguments.tokenizer),
    )


def _efforts(tokenizer: str) -> Efforts:
    efforts = efforts_of(tokenizer)
    if efforts.trouble:
        logger.warning("%s: requests with a reasoning_effort other than none are refused", efforts.trouble)
    return efforts


def worker_of(arguments: argparse.Namespace) -> WorkerSpec:
    """Raises ValueError."""
    if arguments.held_body_bytes < arguments.max_body_bytes:
        raise ValueError(
            f"--held-body-bytes is {arguments.held_body_bytes}, less than one body of --max-body-bytes"
            f" {arguments.max_body_bytes}: give at least as many"
        )
    if arguments.prompt_memory_mib < LEAST_MEMORY_MIB:
        raise ValueError(f"--prompt-memory-mib is {arguments.prompt_memory_mib}; give at least {LEAST_MEMORY_MIB}")
    if not arguments.prompt_s > 0:
        raise ValueError(f"--prompt-s is {arguments.prompt_s:g}; give seconds above 0")
    memory_mib = min(arguments.prompt_memory_mib, max(LEAST_MEMORY_MIB, container_memory_mib() // 2))
    return WorkerSpec(arguments.tokenizer, tokenizer_digest(arguments.tokenizer), memory_mib, arguments.prompt_s)


def container_memory_mib(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Of this process's control group: whatever exceeds it there may end the whole container, not the one process.
    A very large number where there is no limit."""
    try:
        return int(limit.read_text()) >> 20
    except (OSError, ValueError):  # none, or "max"
        return sys.maxsize


def connection_of(arguments: argparse.Namespace) -> Connection | None:
    """To the API server; None: nothing is to be discovered. Raises ConnectionInvalid."""
    if not arguments.discover:
        return None
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
    return from_pod(host, port, arguments.service_account)


def beside_of(
    arguments: argparse.Namespace, key: str, told: dict[str, str], identity: IdentityKeeper | None = None
) -> Beside:
    """What runs beside a gateway. `told` gets the address of the reports. Raises ConnectionInvalid, ValueError."""
    target = parse_target(arguments.discover) if arguments.discover else None
    connection = connection_of(arguments)

    @asynccontextmanager
    async def beside(gateway: Gateway) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if arguments.report_listen:
                reports = serving_reports(gateway.fleet_report, arguments.report_listen, key, identity)
                told["report"] = await stack.enter_async_context(reports)
            if connection is not None and target is not None:
                from sluice_gateway.routing.slice_api import HttpSliceApi  # others need no HTTP client

                api = await stack.enter_async_context(HttpSliceApi(connection, target))
                prefer_v6 = connection.server.startswith("https://[")
                discovery = Discovery(api, gateway.members.set_fleet, prefer_v6)
                await stack.enter_async_context(discovering(discovery))
                await gateway.meet(FIRST_LOOK_S)
            yield

    return beside


def keys_of(fingerprint: Fingerprint, tokens: tuple[int, ...], page_tokens: int) -> tuple[bytes, ...]:
    return block_keys(fingerprint.digest, tokens, page_tokens)


def join_supervisor(arguments: argparse.Namespace) -> Recorder | None:
    """Its recorder; None without a supervisor. Raises RecorderError, FileNotFoundError, SpecError."""
    if arguments.parent:
        die_with_parent(arguments.parent)
    if arguments.faults:
        fault_points.arm(arguments.faults)
    if arguments.recorder is None:
        return None
    answer_with_stacks(arguments.recorder.parent, "gateway")
    return Recorder.attach(arguments.recorder)


def main(argv: Sequence[str] | None = None) -> int:
    drop_what_nobody_reads()
    raise_limit()
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    log.configure(arguments.log, "gateway")
    try:
        settings, tokenizer = make_settings(arguments), load_tokenizer(arguments.tokenizer)
        settings = replace(settings, worker=worker_of(arguments))
        key = "" if arguments.key_file is None else arguments.key_file.read_text().strip()
        identity = None if arguments.tls_dir is None else IdentityKeeper(arguments.tls_dir, Peer.GATEWAY)
        told: dict[str, str] = {}
        beside = beside_of(arguments, key, told, identity)
        recorder = join_supervisor(arguments)
        sock = listen(arguments.listen)
        tracer = make_tracer(arguments.otlp, "gateway", settings.gateway_id[:8])
    except REFUSALS as error:
        print(f"sluice_gateway: {error}", file=sys.stderr)
        return 2
    engines = partial(grpc_factory, key=key, identity=identity)
    app = create_app(
        settings,
        tokenizer,
        engines,
        block_keys=keys_of,
        tracer=tracer,
        recorder=recorder,
        identity=identity,
        beside=beside,
    )

    def on_ready() -> None:
        settle_heap()
        line = json.dumps({"event": "ready", "url": url_of(sock), "pid": os.getpid(), **told})
        print(line, flush=True)
        if arguments.ready_file is not None:
            fresh = arguments.ready_file.with_suffix(".new")
            fresh.write_text(line + "\n")
            fresh.replace(arguments.ready_file)

    # gRPC's poller needs the interpreter for every message: it may not wait 5 ms for its turn.
    sys.setswitchinterval(0.0005)
    give_way()
    server = make_server(app, on_ready)
    try:
        server.run(sockets=[sock])
    except SystemExit:  # uvicorn has logged why; its status is another one's word for a wedge
        return 1
    return 0 if server.started else 1


if __name__ == "__main__":
    raise SystemExit(main())
