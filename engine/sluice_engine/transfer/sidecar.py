"""The transport sidecar: the process that owns the one NIXL agent over a rank's record memory. Killing it is the fence.

    python -m sluice_engine.transfer.sidecar --spec-fd N --memory-fd N --socket PATH

Started by exec, never by fork; no torch, no gRPC. Two threads: this one (the leader's socket) and the poller, plus the
verifier's. A thread that ends is the end of the process, with a reason: one JSON line on stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

import msgspec

from sluice_engine.pool import map_pools
from sluice_engine.transfer.errors import TransferUnavailable
from sluice_engine.transfer.lane import measure_lane
from sluice_engine.transfer.lanes import choose_lanes, count_nvidia_gpus
from sluice_engine.transfer.marks import SidecarMarks
from sluice_engine.transfer.messages import LaneReport, SidecarHello
from sluice_engine.transfer.nixl import (
    CMA_PROGRESS_DELAY_US,
    PROGRESS_DELAY_US,
    NixlSettings,
    NixlTransfer,
    load_nixl,
)
from sluice_engine.transfer.plan import pool_info
from sluice_engine.transfer.poller import Poller
from sluice_engine.transfer.puller import Puller
from sluice_engine.transfer.seal import KEY_BYTES, seal
from sluice_engine.transfer.serve import LeaderServer
from sluice_engine.transfer.spec import SidecarRole, SidecarSpec, read_spec
from sluice_engine.transfer.verify import ThreadVerifier
from sluice_protocol.fingerprint import Fingerprint
from sluice_protocol.source import SourceHello
from sluice_records import RecordKind
from sluice_runtime import fault_points
from sluice_runtime.health.recorder import Recorder
from sluice_runtime.health.stacks import answer_with_stacks
from sluice_runtime.process.outlet import drop_what_nobody_reads
from sluice_runtime.process.processes import give_way

# A start that hangs (an agent, the self-test) ends with every thread's stack on stderr and exit code 1.
START_LIMIT_S = 60.0
EXIT_OK, EXIT_SPEC, EXIT_UNAVAILABLE, EXIT_LEADER_GONE, EXIT_THREAD_DIED = 0, 2, 3, 4, 5


def main(argv: list[str] | None = None) -> NoReturn:
    args = _parse(argv)
    # The parent, by its own word: when this process looks, it may be an orphan already.
    parent = args.parent or os.getppid()
    give_way()
    drop_what_nobody_reads()
    faulthandler.dump_traceback_later(START_LIMIT_S, exit=True)
    signal.signal(signal.SIGTERM, lambda *_: end_process(EXIT_OK, "Terminated"))
    # A terminal's Ctrl-C goes to the whole group; the supervisor decides which process ends, and when.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    marks = _begin_watched(args)
    try:
        spec = read_spec(args.spec_fd)
        if len(spec.key) != KEY_BYTES:
            raise ValueError(f"the key has {len(spec.key)} bytes, not {KEY_BYTES}")
        transfer, puller, lane = build(spec, args.memory_fd, args.lanes or choose_lanes(count_nvidia_gpus()), marks)
    except (msgspec.DecodeError, ValueError, OSError) as error:
        end_process(EXIT_SPEC, "BadSpec", str(error))
    except TransferUnavailable as error:
        end_process(EXIT_UNAVAILABLE, error.reason, str(error))
    hello = describe(spec, transfer, lane)
    server = LeaderServer(
        Path(args.socket),
        hello,
        lambda reason, detail: end_process(EXIT_LEADER_GONE, reason, detail),
        allow_hooks=args.test_hooks,
        row=marks.socket,
    )
    poller = Poller(puller, server.emit, lambda error: end_process(EXIT_THREAD_DIED, "PollerDied", repr(error)), marks)
    poller.start()
    report_line(
        {"event": "ready", "agent": hello.agent_name, "lane": lane.lane, "lanes": lane.lanes, "warning": lane.warning}
    )
    faulthandler.cancel_dump_traceback_later()
    try:
        server.run(poller, lambda: os.getppid() == parent)
    except BaseException as error:
        marks.socket.end(failed=True)
        end_process(EXIT_THREAD_DIED, "SocketLoopDied", repr(error))
    end_process(EXIT_OK, "ParentGone")


def _begin_watched(args: argparse.Namespace) -> SidecarMarks:
    """Before anything that may hang: NIXL's start is one of these things."""
    recorder = None
    if args.recorder:
        recorder = Recorder.attach(args.recorder)
        answer_with_stacks(args.recorder.parent, "sidecar")
    if args.faults:
        fault_points.arm(args.faults)
    marks = SidecarMarks(recorder)
    marks.socket.begin()
    return marks


def build(
    spec: SidecarSpec, memory_fd: int, lanes: str, marks: SidecarMarks
) -> tuple[NixlTransfer, Puller, LaneReport]:
    """Raises TransferUnavailable."""
    settings = NixlSettings(lanes, spec.one_host, spec.tcp_port_range)
    layouts, plan = spec.memory.layouts(), spec.memory.plan
    nixl = load_nixl(settings)
    # One name, one incarnation, even if a counter was used twice.
    name = f"{spec.incarnation}/{os.getpid()}-{os.urandom(4).hex()}"
    lane = measure_lane(nixl, settings, name)
    destinations = None if spec.role is SidecarRole.SOURCE else map_pools(memory_fd, layouts, plan)
    sources = None if spec.role is SidecarRole.READER else map_pools(memory_fd, layouts, plan, writable=False)
    delay_us = CMA_PROGRESS_DELAY_US if lane.lane == "cma" else PROGRESS_DELAY_US
    transfer = NixlTransfer(nixl, name, spec.key, destinations, sources, progress_delay_us=delay_us)
    pools = destinations or {}
    return transfer, Puller(transfer, pools, ThreadVerifier(pools, spec.verify, marks.verifier), spec.puller), lane


def describe(spec: SidecarSpec, transfer: NixlTransfer, lane: LaneReport) -> SidecarHello:
    layouts, plan, bases = spec.memory.layouts(), spec.memory.plan, transfer.source_bases
    pools = tuple(pool_info(layouts[kind], plan[kind], bases[kind]) for kind in RecordKind if kind in bases)
    bare = SourceHello(
        Fingerprint(()),
        spec.incarnation,
        pools,
        transfer.name,
        transfer.agent_name,
        transfer.metadata,
        os.getpid(),
    )
    sealed = seal(bare, spec.key).agent_metadata if transfer.metadata else b""
    return SidecarHello(transfer.name, spec.incarnation, transfer.agent_name, sealed, pools, os.getpid(), lane)


def report_line(fields: dict[str, object]) -> None:
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), json.dumps(fields).encode() + b"\n")


def end_process(code: int, reason: str, detail: str = "") -> NoReturn:
    """At once, from any thread: agents are not destroyed (that may hang), nothing lands after it."""
    report_line({"event": "exit", "code": code, "reason": reason, "detail": detail, "at": time.time()})
    os._exit(code)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sluice_engine.transfer.sidecar")
    parser.add_argument("--spec-fd", type=int, required=True)
    parser.add_argument("--memory-fd", type=int, required=True)
    parser.add_argument("--socket", required=True)
    parser.add_argument(
        "--parent", type=int, default=0, help="end when this process ends; default: the parent at the start"
    )
    parser.add_argument("--recorder", type=Path, help="the flight recorder, in the engine's run directory")
    parser.add_argument("--faults", default="", help=argparse.SUPPRESS)
    # For tests, which need a lane with a real window in flight, and to hold the poller between pieces.
    parser.add_argument("--lanes", default="", help=argparse.SUPPRESS)
    parser.add_argument("--test-hooks", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
