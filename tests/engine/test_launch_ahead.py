"""A rank hands its device the next step while the one before is computed, and reports each once it is complete."""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Iterator
from queue import Empty, Queue

import pytest
from engine_double import Engine, scripted_model

from sluice_engine import wire
from sluice_engine.pool import Pools
from sluice_engine.rank.executor import MOST_LAUNCHED, Executor
from sluice_engine.rank.host_store import HostStore
from sluice_engine.rank.mirror import RecordMirror
from sluice_engine.rank.rank import run_steps
from sluice_engine.step import RowBinding, RowWork, SampledRow, StepResult
from sluice_records import RecordKind
from sluice_runtime.health.recorder import unrecorded

pytestmark = pytest.mark.timeout(60)
WAIT_S = 20.0


class BlockedDevice:
    """The scripted model as on a device: what is launched is complete when the test says so."""

    def __init__(self, pools: Pools, mirror: RecordMirror) -> None:
        self._model = scripted_model(pools, mirror)
        self._work: deque[tuple[RowWork, ...]] = deque()
        self.launched: Queue[int] = Queue()
        self._completed = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_NONBLOCK)

    @property
    def completion(self) -> int | None:
        return self._completed

    def complete_one(self) -> None:
        os.eventfd_write(self._completed, 1)

    def bind(self, binding: RowBinding) -> None:
        self._model.bind(binding)

    def append_pages(self, row: int, pages: tuple[int, ...]) -> None:
        self._model.append_pages(row, pages)

    def free(self, row: int) -> None:
        self._model.free(row)

    def launch(self, work: tuple[RowWork, ...]) -> None:
        self._model.launch(work)
        self._work.append(work)
        self.launched.put(len(work))

    def collect(self) -> tuple[SampledRow, ...]:
        os.set_blocking(self._completed, True)
        os.eventfd_read(self._completed)
        os.set_blocking(self._completed, False)
        self._work.popleft()
        return self._model.collect()

    def close(self) -> None:
        os.close(self._completed)


class Rank:
    """`run_steps` in a thread of its own, over a socket, as the leader has it."""

    def __init__(self, pools: Pools, mirror: RecordMirror) -> None:
        self.device = BlockedDevice(pools, mirror)
        executor = Executor(0, HostStore(0, pools), mirror, self.device)
        self._leader, self._rank = socket.socketpair()
        self.results: Queue[StepResult] = Queue()
        asked = wire.FrameSocket(self._rank), executor, unrecorded("rank0.loop"), self.results.put
        self._thread = threading.Thread(target=run_steps, args=asked)
        self._thread.start()

    def send(self, frame: bytes) -> None:
        wire.send_frame(self._leader, frame)

    def close(self) -> None:
        self._leader.close()
        for _ in range(MOST_LAUNCHED):
            self.device.complete_one()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self._rank.close()
        self.device.close()


@pytest.fixture
def frames() -> list[bytes]:
    """Of steps of one sequence, each of which computes."""
    engine = Engine(overlap=True)
    sent: list[bytes] = []
    engine.submit((1, 2, 3), 6)
    while len(sent) < 4:
        engine.step()
        sent += [frame for frame in engine.frames if frame not in sent]
    return sent


@pytest.fixture
def rank() -> Iterator[Rank]:
    engine = Engine()
    running = Rank(engine.pools, RecordMirror(engine.pool_plan))
    yield running
    running.close()


def nothing_comes(queue: Queue[StepResult] | Queue[int]) -> bool:
    try:
        queue.get(timeout=0.3)
    except Empty:
        return True
    return False


def test_the_next_step_is_launched_before_the_one_before_is_collected(rank: Rank, frames: list[bytes]) -> None:
    rank.send(frames[0])
    assert rank.device.launched.get(timeout=WAIT_S) == 1
    rank.send(frames[1])
    assert rank.device.launched.get(timeout=WAIT_S) == 1, "step 1 is with the device while it computes step 0"
    assert rank.results.empty()
    rank.send(frames[2])
    assert nothing_comes(rank.device.launched), "no more than two steps are with the device"
    rank.device.complete_one()
    assert rank.results.get(timeout=WAIT_S).number == 0
    assert rank.device.launched.get(timeout=WAIT_S) == 1
    for number in (1, 2):
        rank.device.complete_one()
        assert rank.results.get(timeout=WAIT_S).number == number


def test_a_step_that_is_complete_is_reported_though_no_other_step_comes(rank: Rank, frames: list[bytes]) -> None:
    rank.send(frames[0])
    assert rank.device.launched.get(timeout=WAIT_S) == 1
    assert nothing_comes(rank.results)
    rank.device.complete_one()
    assert rank.results.get(timeout=WAIT_S).number == 0


def test_results_are_those_of_a_rank_that_computes_each_step_at_once(rank: Rank, frames: list[bytes]) -> None:
    engine = Engine()
    mirror = RecordMirror(engine.pool_plan)
    executor = Executor(0, HostStore(0, engine.pools), mirror, scripted_model(engine.pools, mirror))
    wanted = [executor.execute(frame) for frame in frames]
    for frame in frames:
        rank.send(frame)
    for expected in wanted:
        rank.device.complete_one()
        told = rank.results.get(timeout=WAIT_S)
        assert (told.number, told.sampled, told.digests) == (expected.number, expected.sampled, expected.digests)
    assert any(engine.pools[RecordKind.STATE].buffer), "the scripted model has written something"
