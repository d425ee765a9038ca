"""A rank: executes the step records that its leader sends, reports facts, decides nothing.

`main` runs in a process of its own, started by exec (scripted model) or forked from a zygote that has torch.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from sluice_engine import wire
from sluice_engine.pool import Pools, map_pools
from sluice_engine.rank.device import BatchModel
from sluice_engine.rank.executor import MOST_LAUNCHED, Executor
from sluice_engine.rank.host_store import HostStore
from sluice_engine.rank.mirror import RecordMirror
from sluice_engine.rank.scripted import Script, ScriptedModel
from sluice_engine.spec import ResolvedEngine, load_spec, resolve
from sluice_engine.step import RowWork, SampledRow, StepDivergence, StepResult
from sluice_protocol.engine_spec import EngineSpec
from sluice_runtime import fault_points
from sluice_runtime.health.layout import Field, Phase
from sluice_runtime.health.recorder import Row, rows_of
from sluice_runtime.health.stacks import answer_with_stacks
from sluice_runtime.process.outlet import drop_what_nobody_reads
from sluice_runtime.process.processes import die_with_parent, give_way, settle_heap

KEEPALIVE_MS = 500
LINGER_S = 5.0


class RankHello(msgspec.Struct, frozen=True, tag=True):
    rank: int
    pid: int


class LoadProgress(msgspec.Struct, frozen=True, tag=True):
    """Bytes of weights."""

    rank: int
    loaded: int
    total: int


class RankReady(msgspec.Struct, frozen=True, tag=True):
    rank: int


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """The rank's last words."""

    rank: int
    reason: str
    detail: str


class StepExecuted(msgspec.Struct, frozen=True, tag=True):
    result: StepResult


RankMessage = RankHello | LoadProgress | RankReady | RankFailed | StepExecuted

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[RankMessage] = msgspec.msgpack.Decoder(RankMessage)


def encode_rank_message(message: RankMessage) -> bytes:
    return _encoder.encode(message)


def decode_rank_message(frame: bytes | memoryview) -> RankMessage:
    return _decoder.decode(frame)


def build_model(
    spec: EngineSpec, resolved: ResolvedEngine, pools: Pools, mirror: RecordMirror, progress: Callable[[int, int], None]
) -> BatchModel:
    if spec.scripted is not None:
        script = Script(token_cost_us=spec.scripted.token_cost_us, step_cost_us=spec.scripted.step_cost_us)
        return ScriptedModel(script, pools, mirror)
    from sluice_engine.rank.runner import build_runner  # torch only where a real model runs

    return build_runner(Path(spec.model), resolved.layouts, pools, mirror, threads=spec.threads, progress=progress)


class WatchedModel:
    """The model, with its marks: what the device was given, and what it has completed."""

    def __init__(self, model: BatchModel, loop: Row, device: Row) -> None:
        self._model, self._loop, self._device = model, loop, device
        self._rows: deque[int] = deque()  # of each batch that is with the device
        self._completed = 0
        self.bind, self.append_pages, self.free = model.bind, model.append_pages, model.free

    @property
    def completion(self) -> int | None:
        return self._model.completion

    def launch(self, work: tuple[RowWork, ...]) -> None:
        self._rows.append(len(work))
        self._device.pending(sum(self._rows))
        self._device.enter(Phase.DEVICE)
        self._loop.enter(Phase.DEVICE)
        fault_points.reach("rank.device")
        self._model.launch(work)
        if self.completion is None:
            self._complete()
        self._loop.enter(Phase.BOOKKEEPING)

    def collect(self) -> tuple[SampledRow, ...]:
        if self.completion is None:
            return self._model.collect()
        self._loop.enter(Phase.DEVICE)
        sampled = self._model.collect()
        self._complete()
        self._loop.enter(Phase.BOOKKEEPING)
        return sampled

    def _complete(self) -> None:
        self._rows.popleft()
        self._completed += 1
        self._device.progress(self._completed)
        self._device.pending(sum(self._rows))
        if not self._rows:
            self._device.enter(Phase.IDLE)
        self._loop.tick()


def run_steps(frames: wire.FrameSocket, executor: Executor, loop: Row, report: Callable[[StepResult], None]) -> None:
    """Until the leader is gone. The next step is launched while the device computes, if it is there in time; a result
    is reported as soon as it is complete."""
    loop.tick()
    loop.enter(Phase.RECEIVING)
    while True:
        if executor.is_done or executor.num_launched == MOST_LAUNCHED:
            result = executor.collect()
            loop.enter(Phase.REPORTING)
            fault_points.reach("rank.report")
            report(result)
            loop.progress(result.number + 1)
            loop.pending(executor.num_launched)
            loop.tick()
            loop.enter(Phase.RECEIVING)
            continue
        frames.wake_by(executor.model.completion if executor.num_launched else None)
        if not frames.wait(KEEPALIVE_MS):
            loop.tick()
            if not executor.num_launched:
                fault_points.reach("rank.receive")
            continue
        frame = frames.receive()
        if frame is None:
            return
        loop.tick()
        loop.pending(executor.num_launched + 1)
        loop.enter(Phase.BOOKKEEPING)
        fault_points.reach("rank.receive")
        executor.launch(frame)


def serve(spec: EngineSpec, rank: int, memory_fd: int) -> None:
    """Until the leader is gone. A step that cannot be executed is reported, and ends this process."""
    give_way()
    answer_with_stacks(Path(spec.run_dir), f"rank{rank}")
    if spec.faults:
        fault_points.arm(spec.faults)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(spec.socket_path)
    frames = wire.FrameSocket(sock)

    def say(message: RankMessage) -> None:
        wire.send_frame(sock, encode_rank_message(message))

    loop, device = rows_of(spec.recorder_path, f"rank{rank}.loop", f"rank{rank}.device")
    loop.begin(Phase.LOADING)
    device.begin(Phase.IDLE)

    def progress(loaded: int, total: int) -> None:
        loop.tick()
        loop.count(Field.COUNT_A, loaded)
        fault_points.reach("rank.progress")
        say(LoadProgress(rank, loaded, total))

    say(RankHello(rank, os.getpid()))
    try:
        fault_points.reach("rank.load")
        resolved = resolve(spec)
        pools, mirror = map_pools(memory_fd, resolved.layouts, resolved.pools), RecordMirror(resolved.pools)
        model = WatchedModel(build_model(spec, resolved, pools, mirror, progress), loop, device)
        executor = Executor(rank, HostStore(rank, pools), mirror, model)
        settle_heap()
        say(RankReady(rank))
        run_steps(frames, executor, loop, lambda result: say(StepExecuted(result)))
    except (BrokenPipeError, ConnectionResetError):
        return  # the leader is gone
    except Exception as error:
        reason = "StepDivergence" if isinstance(error, StepDivergence) else type(error).__name__
        say(RankFailed(rank, reason, str(error)))
        traceback.print_exc()
        _linger(sock)
        raise SystemExit(1) from error


def _linger(sock: socket.socket) -> None:
    """Until the leader is gone, LINGER_S at most: it may be writing the next step, and if this end were closed, the
    leader's would be closed before it has read the last words."""
    until = time.monotonic() + LINGER_S
    with contextlib.suppress(OSError):  # a time-out is one
        while (left := until - time.monotonic()) > 0:
            sock.settimeout(left)
            if not sock.recv(1 << 16):
                return


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m sluice_engine.rank.rank")
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--memory-fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args(argv)
    die_with_parent(args.parent)
    drop_what_nobody_reads()
    # A terminal's Ctrl-C goes to the whole group; the supervisor decides which process ends, and when.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(load_spec(args.spec), args.rank, args.memory_fd)


if __name__ == "__main__":
    main()
