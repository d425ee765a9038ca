"""Start-up self-test: which lane UCX takes between two agents of this process, and how fast it is.

Under CMA a READ is copied inside the post and done when that returns; every other lane is still in progress then. So
the lane is seen from outside, without reading anybody's log. What it cannot see is a peer in another container, where
ptrace may be forbidden: `Stats` counts the pieces that were done at once, which says it for real peers.
"""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

import numpy as np

from sluice_engine.transfer.errors import TransferUnavailable
from sluice_engine.transfer.messages import LaneReport
from sluice_engine.transfer.nixl import NixlSettings, create_agent

_BYTES = 16 * 1024 * 1024
_PROBE_BYTES = 256 * 1024
_ROUNDS = 3
_LIMIT_S = 10.0


def measure_lane(nixl: ModuleType, settings: NixlSettings, name: str) -> LaneReport:
    """Before the process has its agent: both probes are destroyed again. Raises TransferUnavailable."""
    source, reader = create_agent(nixl, f"{name}/probe-source"), create_agent(nixl, f"{name}/probe-reader")
    theirs, ours = np.full(_BYTES, 0x5A, dtype=np.uint8), np.zeros(_BYTES, dtype=np.uint8)
    registered = [
        (agent, agent.register_memory(_row(buffer), "DRAM")) for agent, buffer in ((source, theirs), (reader, ours))
    ]
    peer = reader.add_remote_agent(source.get_agent_metadata()).decode()
    try:
        for _ in range(_ROUNDS):
            _read(reader, peer, ours, theirs, _PROBE_BYTES)
        at_once = [_read(reader, peer, ours, theirs, _PROBE_BYTES)[0] for _ in range(_ROUNDS)]
        seconds = sorted(_read(reader, peer, ours, theirs, _BYTES)[1] for _ in range(_ROUNDS))
    except RuntimeError as error:
        raise TransferUnavailable(f"the self-test's READ failed: {type(error).__name__}: {error}") from error
    if not np.array_equal(ours, theirs):
        raise TransferUnavailable("the self-test read other bytes than were there")
    reader.remove_remote_agent(peer)
    for agent, memory in registered:
        agent.deregister_memory(memory)
    lane, expected = "cma" if all(at_once) else "tcp", "cma" if "cma" in settings.lanes.split(",") else "tcp"
    warning = "" if lane == expected else f"lane is {lane}, expected was {expected}: is ptrace permitted here?"
    return LaneReport(lane, expected, _BYTES / seconds[len(seconds) // 2], warning)


def _row(buffer: Any) -> list[tuple[int, int, int, str]]:
    return [(int(buffer.ctypes.data), int(buffer.nbytes), 0, "")]


def _read(agent: Any, peer: str, ours: Any, theirs: Any, nbytes: int) -> tuple[bool, float]:
    """(done when the post returned, seconds)."""
    local = agent.get_xfer_descs([(int(ours.ctypes.data), nbytes, 0)], "DRAM")
    remote = agent.get_xfer_descs([(int(theirs.ctypes.data), nbytes, 0)], "DRAM")
    handle = agent.initialize_xfer("READ", local, remote, peer)
    start = time.monotonic()
    state = agent.transfer(handle)
    at_once = state == "DONE"
    while state == "PROC":
        if time.monotonic() - start > _LIMIT_S:
            raise TransferUnavailable(f"the self-test's READ of {nbytes} bytes is not done after {_LIMIT_S} s")
        time.sleep(20e-6)
        state = agent.check_xfer_state(handle)
    took = time.monotonic() - start
    agent.release_xfer_handle(handle)
    return at_once, took
