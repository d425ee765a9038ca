"""The armed side: one `stat` for each time that a point is reached, and no more while no order lies there."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from sluice_faults.actions import changed, perform
from sluice_faults.order import Action, Order, OrderError, acknowledge, parse, path_of

CHANGES = frozenset({Action.FLIP, Action.DROP, Action.REPEAT})


@dataclass(slots=True)
class _Known:
    """An order as it was read. `stamp` tells it from one that was placed later under the same name."""

    stamp: tuple[int, int]
    order: Order
    seen: int = 0
    acted: int = 0
    which: int | None = None


def arm(directory: str) -> DirectoryFaults:
    """The entry point. Raises OrderError where there is no such directory."""
    path = Path(directory)
    if not path.is_dir():
        raise OrderError(f"{directory}: no such directory to take orders from")
    return DirectoryFaults(path)


class DirectoryFaults:
    """Any thread may reach any point; each point has one thread at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[str, _Known] = {}
        self._last: dict[str, bytes] = {}

    def reach(self, point: str) -> None:
        known = self._due(point)
        if known is None or known.order.action in CHANGES or known.order.action is Action.HOLD:
            return
        acknowledge(self._directory, point, threading.get_native_id())
        perform(known.order, lambda: self._stamp(point) == known.stamp)

    def change(self, point: str, data: bytes) -> bytes:
        known = self._due(point)
        last, self._last[point] = self._last.get(point, b""), data
        if known is None:
            return data
        acknowledge(self._directory, point, threading.get_native_id())
        return changed(known.order, data, last)

    def holds(self, point: str) -> bool:
        return self._holder(point) is not None

    def holds_one(self, point: str, which: int) -> bool:
        """The first that is held is the one."""
        known = self._holder(point)
        if known is None:
            return False
        if known.which is None:
            known.which = which
        return which == known.which

    def _holder(self, point: str) -> _Known | None:
        """The order that holds back whoever is there."""
        known = self._due(point)
        if known is None or known.order.action not in (Action.HOLD, Action.PASS):
            return None
        acknowledge(self._directory, point, threading.get_native_id())
        return known if known.order.action is Action.HOLD else None

    def _due(self, point: str) -> _Known | None:
        """The order that acts now, counted as acting."""
        known = self._read(point)
        if known is None or known.order.pid not in (0, os.getpid()):
            return None
        known.seen += 1
        if known.seen <= known.order.after or (known.order.times and known.acted >= known.order.times):
            return None
        known.acted += 1
        return known

    def _read(self, point: str) -> _Known | None:
        stamp = self._stamp(point)
        if stamp is None:
            self._known.pop(point, None)
            return None
        known = self._known.get(point)
        if known is None or known.stamp != stamp:
            try:
                known = _Known(stamp, parse(path_of(self._directory, point).read_bytes(), point))
            except (OrderError, FileNotFoundError) as error:
                # A process under test must not die of the tester's mistake; who waits for the word will see this.
                print(f"sluice-faults: {error}", file=sys.stderr, flush=True)
                return None
            self._known[point] = known
        return known

    def _stamp(self, point: str) -> tuple[int, int] | None:
        try:
            stat = os.stat(f"{self._directory}/{point}.json")  # noqa: PTH116  # a Path costs more than the call
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns
