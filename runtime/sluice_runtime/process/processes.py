"""What processes of ours do at their start, how they end each other, and what is heard of what they print."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping

PR_SET_PDEATHSIG = 1
# `limit` of a child's stdout: the longest event, e.g. a death with its traceback.
MAX_EVENT_BYTES = 1 << 20
# Of the reader's time, for a child that prints without end: so long at once, then so long for all others.
SLICE_S, PAUSE_S = 0.002, 0.008
GC_LOT = 50_000
# docs/adr/0099: gRPC's poller without the event engine. Read by gRPC when it is imported, so by a child only.
WITHOUT_EVENT_ENGINE = ",".join(f"-event_engine_{part}" for part in ("client", "listener", "callback_cq", "fork"))


def child_environment() -> dict[str, str]:
    """What libraries read when they are imported; what is set already is left as it is. numpy would start a thread
    for each core, and ours multiply no matrices with it."""
    return {"GRPC_EXPERIMENTS": WITHOUT_EVENT_ENGINE, "OPENBLAS_NUM_THREADS": "1", **os.environ}


def say(event: str, **fields: object) -> None:
    """One JSON line on stdout, for the process that started this one."""
    pass_on({"event": event, **fields})


def pass_on(event: Mapping[str, object]) -> None:
    """One JSON line on stdout, in one write."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def die_with_parent(parent: int, sig: signal.Signals = signal.SIGKILL) -> None:
    """From now on this process gets `sig` when `parent` (its present parent) dies; exits if that has happened."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(sig), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


def give_way() -> None:
    """From now on this thread, and those that it starts, take the CPU from no other when they are woken
    (docs/adr/0103). A policy that it was given from outside stays."""
    _move_policy(os.SCHED_OTHER, os.SCHED_BATCH)


def go_first() -> None:
    """This thread alone takes it again."""
    _move_policy(os.SCHED_BATCH, os.SCHED_OTHER)


def _move_policy(old: int, new: int) -> None:
    with contextlib.suppress(OSError):  # a sandbox may forbid it, and nothing but speed depends on it
        if os.sched_getscheduler(0) == old:
            os.sched_setscheduler(0, new, os.sched_param(0))


def settle_heap() -> None:
    """Once a process has started: the collector no longer looks at what is there (modules, books of every record),
    which lives until the end anyway, and looks at what is new in larger lots than Python's 700 objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_LOT, 10, 10)


async def json_lines(
    stream: asyncio.StreamReader, on_noise: Callable[[bytes], None]
) -> AsyncIterator[dict[str, object]]:
    """The JSON objects that a child prints, one a line; all else, such as a line longer than the stream's limit, is
    noise. Another call goes on where the last one was left. A child that never stops has SLICE_S at a time."""
    is_rest = False
    clock = asyncio.get_running_loop().time
    slice_over = clock() + SLICE_S
    while True:
        if (now := clock()) > slice_over:
            await asyncio.sleep(PAUSE_S)
            slice_over = clock() + SLICE_S
        try:
            line = await stream.readuntil(b"\n")
            if clock() - now > SLICE_S:  # others had their turn meanwhile
                slice_over = clock() + SLICE_S
        except asyncio.LimitOverrunError as error:
            on_noise(await stream.readexactly(error.consumed))
            is_rest = True
            continue
        except asyncio.IncompleteReadError as error:
            line = error.partial
            if not line:
                return
        event = None if is_rest else _parse(line)
        is_rest = False
        if isinstance(event, dict):
            yield event
        else:
            on_noise(line)


def _parse(line: bytes) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
