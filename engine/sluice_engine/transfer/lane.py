"""Start-up self-test: which lane UCX takes between two agents of this process, and how fast it is.

The lane is read off the process's own TCP sockets: what a READ brings over TCP is counted there (`TCP_INFO`), what CMA
copies is not. What the self-test cannot see is a peer in another container, where ptrace may be forbidden and UCX falls
back to TCP without a word: `Stats` has both sums (`bytes`, `tcp_bytes`) for that.
"""

from __future__ import annotations

import os
import socket
import stat
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from sluice_engine.transfer.errors import TransferUnavailable
from sluice_engine.transfer.messages import LaneReport
from sluice_engine.transfer.nixl import NixlSettings, create_agent

_BYTES = 16 * 1024 * 1024
_WARM_UP_BYTES = 256 * 1024
_ROUNDS = 3
_LIMIT_S = 10.0
# Offset of `tcpi_bytes_received` in `struct tcp_info` (linux/tcp.h): 8 bytes, 24 u32, then pacing and acked as u64.
_BYTES_RECEIVED_AT = 8 + 24 * 4 + 3 * 8


def measure_lane(nixl: ModuleType, settings: NixlSettings, name: str) -> LaneReport:
    """Before the process has its agent: both probes are destroyed again. Raises TransferUnavailable."""
    try:
        over_tcp, seconds = _probe(nixl, name)
    except TransferUnavailable:
        raise
    except Exception as error:
        raise TransferUnavailable(f"the self-test's READ failed: {type(error).__name__}: {error}") from error
    lane, expected = "tcp" if over_tcp > 0.5 else "cma", "cma" if "cma" in settings.lanes.split(",") else "tcp"
    warning = "" if lane == expected else f"lane is {lane}, expected was {expected}: is ptrace permitted here?"
    return LaneReport(lane, expected, _BYTES / seconds, warning, settings.lanes)


def _probe(nixl: ModuleType, name: str) -> tuple[float, float]:
    """(part of the bytes that came over TCP, median seconds) of READs between two agents."""
    source, reader = create_agent(nixl, f"{name}/probe-source"), create_agent(nixl, f"{name}/probe-reader")
    theirs, ours = np.full(_BYTES, 0x5A, dtype=np.uint8), np.zeros(_BYTES, dtype=np.uint8)
    registered = [
        (agent, agent.register_memory(_row(buffer), "DRAM")) for agent, buffer in ((source, theirs), (reader, ours))
    ]
    peer = reader.add_remote_agent(source.get_agent_metadata()).decode()
    for _ in range(_ROUNDS):
        _read(reader, peer, ours, theirs, _WARM_UP_BYTES)
    before = tcp_bytes_received()
    seconds = sorted(_read(reader, peer, ours, theirs, _BYTES) for _ in range(_ROUNDS))
    over_tcp = (tcp_bytes_received() - before) / (_ROUNDS * _BYTES)
    if not np.array_equal(ours, theirs):
        raise TransferUnavailable("the self-test read other bytes than were there")
    reader.remove_remote_agent(peer)
    for agent, memory in registered:
        agent.deregister_memory(memory)
    return over_tcp, seconds[_ROUNDS // 2]


def tcp_bytes_received() -> int:
    """By all TCP sockets that this process has open now."""
    return sum(_received_by(int(entry.name)) for entry in Path("/proc/self/fd").iterdir())


def _received_by(fd: int) -> int:
    """0 for what is no TCP socket, or is closed meanwhile by another thread."""
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return 0
        with socket.socket(fileno=os.dup(fd)) as seen:
            if seen.family not in (socket.AF_INET, socket.AF_INET6) or seen.type != socket.SOCK_STREAM:
                return 0
            info = seen.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:
        return 0
    end = _BYTES_RECEIVED_AT + 8
    return int.from_bytes(info[_BYTES_RECEIVED_AT:end], "little") if len(info) >= end else 0


def _row(buffer: Any) -> list[tuple[int, int, int, str]]:
    return [(int(buffer.ctypes.data), int(buffer.nbytes), 0, "")]


def _read(agent: Any, peer: str, ours: Any, theirs: Any, nbytes: int) -> float:
    """Seconds."""
    local = agent.get_xfer_descs([(int(ours.ctypes.data), nbytes, 0)], "DRAM")
    remote = agent.get_xfer_descs([(int(theirs.ctypes.data), nbytes, 0)], "DRAM")
    handle = agent.initialize_xfer("READ", local, remote, peer)
    start = time.monotonic()
    state = agent.transfer(handle)
    while state == "PROC":
        if time.monotonic() - start > _LIMIT_S:
            raise TransferUnavailable(f"the self-test's READ of {nbytes} bytes is not done after {_LIMIT_S} s")
        time.sleep(20e-6)
        state = agent.check_xfer_state(handle)
    took = time.monotonic() - start
    agent.release_xfer_handle(handle)
    return took
