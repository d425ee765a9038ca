"""What an order does to the thread that meets it. `lies()` says whether the order is still there."""

from __future__ import annotations

import builtins
import itertools
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from sluice_faults.foreign import freeze_rpc
from sluice_faults.order import Action, Order

LOOK_S = 0.02
# A little less than one turn of `deque(repeat)` takes here: the spin is rather too long than too short.
SPIN_TURNS_PER_S = 400_000_000
PAGE = 4096

Lies = Callable[[], bool]


def perform(order: Order, lies: Lies) -> None:
    """Raises what the order says; returns when the effect is over."""
    _ACTIONS[order.action](order, lies)


def changed(order: Order, data: bytes, last: bytes) -> bytes:
    if order.action is Action.FLIP and data:
        at = order.offset % len(data)
        return data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :]
    if order.action is Action.DROP:
        return b""
    return last if order.action is Action.REPEAT else data


def _block(order: Order, lies: Lies) -> None:
    lock = threading.Lock()
    lock.acquire()
    while lies():
        lock.acquire(timeout=LOOK_S)


def _spin(order: Order, lies: Lies) -> None:
    while lies():
        until = time.monotonic() + LOOK_S
        while time.monotonic() < until:
            pass


def _spin_gil(order: Order, lies: Lies) -> None:
    deque(itertools.repeat(None, int(order.seconds * SPIN_TURNS_PER_S)), maxlen=0)


def _sleep(order: Order, lies: Lies) -> None:
    time.sleep(order.seconds)


def _raise(order: Order, lies: Lies) -> None:
    kind = getattr(builtins, order.error, None)
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        raise ValueError(f"error {order.error!r} is no builtin exception")
    raise kind(order.errno, os.strerror(order.errno)) if order.errno else kind(order.text)


def _end(order: Order, lies: Lies) -> None:
    raise SystemExit(order.text)


def _exhaust(order: Order, lies: Lies) -> None:
    """MemoryError, and the limit stays: whoever goes on has no memory to go on with."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
    limit = used + (order.mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    bytearray(2 * limit)


def _freeze_rpc(order: Order, lies: Lies) -> None:
    freeze_rpc()


def _nothing(order: Order, lies: Lies) -> None:
    pass


_ACTIONS: Mapping[Action, Callable[[Order, Lies], None]] = {
    Action.PASS: _nothing,
    Action.BLOCK: _block,
    Action.SPIN: _spin,
    Action.SPIN_GIL: _spin_gil,
    Action.SLEEP: _sleep,
    Action.RAISE: _raise,
    Action.END: _end,
    Action.EXHAUST: _exhaust,
    Action.FREEZE_RPC: _freeze_rpc,
}
