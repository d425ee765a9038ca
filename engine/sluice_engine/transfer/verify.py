"""After arrival, before commit: is this the record that was granted? Trailer always, digest by level; never nothing."""

from __future__ import annotations

import queue
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from sluice_engine.pool import LOT_BYTES, Pools, RecordPool
from sluice_engine.step import PullItem
from sluice_engine.transfer.contract import Failure
from sluice_engine.transfer.plan import PIECE_BYTES
from sluice_records import RecordKind, Trailer
from sluice_runtime import fault_points
from sluice_runtime.health.layout import Phase
from sluice_runtime.health.recorder import Row, unrecorded


class VerifyLevel(StrEnum):
    """FULL: every digest. SAMPLE: digests of all states and snapshots, and of every k-th page. Trailers: always."""

    FULL = "full"
    SAMPLE = "sample"


@dataclass(frozen=True, slots=True)
class VerifyPolicy:
    level: VerifyLevel = VerifyLevel.FULL
    every: int = 8


@dataclass(frozen=True, slots=True)
class Lot:
    """Records of one pull that are checked together: the trailers of all `items`, the digests of those in `due`.
    `serial` is the puller's number of the pull."""

    serial: int
    items: Sequence[PullItem]
    due: Sequence[PullItem]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """`failures`: which records of the lot are not what was granted, and why."""

    lot: Lot
    failures: Sequence[tuple[PullItem, Failure]]


def check_trailer(pool: RecordPool, item: PullItem) -> Failure | None:
    granted = Trailer(pool.layout.format_id, item.identity, item.source_generation, item.valid_tokens, item.digest)
    difference = pool.difference(item.destination, granted)
    return None if difference is None else _mismatch(difference[0], item, difference[1])


def check_digests(pool: RecordPool, items: Sequence[PullItem]) -> list[tuple[PullItem, Failure]]:
    """Those that differ."""
    found = pool.digests([item.destination for item in items], [item.identity for item in items])
    return [
        (item, _mismatch("DigestMismatch", item, _differ(digest, item.digest)))
        for digest, item in zip(found, items, strict=True)
        if digest != item.digest
    ]


def _differ(found: int, granted: int) -> str:
    return f"bytes digest to {found:#018x}, granted was {granted:#018x}"


def _mismatch(reason: str, item: PullItem, detail: str) -> Failure:
    return Failure(reason, f"{item.kind.value} record {item.destination} from {item.source}: {detail}")


class Verifier(Protocol):
    def submit(self, serial: int, items: Sequence[PullItem]) -> None:
        """Queue them for verification, by `help` or by the thread that `rouse` wakes."""
        ...

    def rouse(self) -> None:
        """The caller will not help soon: wake the thread that can verify what waits."""
        ...

    def collect(self) -> list[Verdict]:
        """Verdicts since the last call; never waits. Raises what ended the verifier, if anything did."""
        ...

    def help(self) -> bool:
        """Check some records that wait, in the caller's thread, for at most as long as a piece is digested. False:
        there was none. Their verdicts come with `collect`."""
        ...

    def close(self) -> None: ...


class _Checker:
    def __init__(self, pools: Pools, policy: VerifyPolicy) -> None:
        self._pools, self._policy = pools, policy
        self._pages = 0

    def plan(self, serial: int, items: Sequence[PullItem], lot_bytes: int) -> list[Lot]:
        """Lots of `lot_bytes` or a little more. One thread plans."""
        lots: list[Lot] = []
        first = nbytes = 0
        for end, item in enumerate(items, 1):
            nbytes += self._pools[item.kind].layout.record_bytes
            if nbytes >= lot_bytes or end == len(items):
                part = items[first:end]
                lots.append(Lot(serial, part, self._due(part), nbytes))
                first, nbytes = end, 0
        return lots

    def check(self, lot: Lot) -> Verdict:
        failures: list[tuple[PullItem, Failure]] = []
        for item in lot.items:
            failure = check_trailer(self._pools[item.kind], item)
            if failure is not None:
                failures.append((item, failure))
        wrong = [item for item, _ in failures]
        due: dict[RecordKind, list[PullItem]] = {}
        for item in lot.due:
            if not wrong or item not in wrong:
                due.setdefault(item.kind, []).append(item)
        for kind, of_kind in due.items():
            failures += check_digests(self._pools[kind], of_kind)
        return Verdict(lot, failures)

    def _due(self, items: Sequence[PullItem]) -> Sequence[PullItem]:
        if self._policy.level is VerifyLevel.FULL:
            return items
        return [item for item in items if item.kind is not RecordKind.PAGE or self._is_next_due()]

    def _is_next_due(self) -> bool:
        self._pages += 1
        return self._pages % self._policy.every == 1 % self._policy.every


class SliceVerifier:
    """In the caller's thread, a few records a call."""

    def __init__(self, pools: Pools, policy: VerifyPolicy = VerifyPolicy(), records_per_call: int = 4) -> None:
        self._checker, self._slice = _Checker(pools, policy), records_per_call
        self._waiting: deque[Lot] = deque()

    def submit(self, serial: int, items: Sequence[PullItem]) -> None:
        for start in range(0, len(items), self._slice):
            self._waiting += self._checker.plan(serial, items[start : start + self._slice], sys.maxsize)

    def rouse(self) -> None:
        pass

    def collect(self) -> list[Verdict]:
        return [self._checker.check(self._waiting.popleft())] if self._waiting else []

    def help(self) -> bool:
        return False

    def close(self) -> None:
        self._waiting.clear()


class ThreadVerifier:
    """In a thread of its own: numpy sums without the interpreter's lock, so copying goes on meanwhile. It is woken when
    it is roused or when more waits than a helper checks at once: a wake-up costs as much as a few small records."""

    def __init__(
        self,
        pools: Pools,
        policy: VerifyPolicy = VerifyPolicy(),
        row: Row | None = None,
        lot_bytes: int = LOT_BYTES,
    ) -> None:
        """`lot_bytes`: small records are checked together, until they are so many."""
        self._checker, self._lot_bytes = _Checker(pools, policy), lot_bytes
        self._row = row or unrecorded("sidecar.verifier")
        # Deques need no lock.
        self._asked: deque[Lot] = deque()
        self._told: deque[Verdict | BaseException] = deque()
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._is_roused = False
        self._can_help = all(pool.layout.record_bytes <= PIECE_BYTES for pool in pools.values())
        self._thread = threading.Thread(target=self._run, name="sluice-verify", daemon=True)
        self._thread.start()

    def submit(self, serial: int, items: Sequence[PullItem]) -> None:
        self._asked += self._checker.plan(serial, items, self._lot_bytes)
        if not self._can_help or sum(lot.nbytes for lot in tuple(self._asked)) > self._lot_bytes:
            self.rouse()

    def rouse(self) -> None:
        if self._asked and not self._is_roused:
            self._is_roused = True
            self._wake.put(True)

    def collect(self) -> list[Verdict]:
        verdicts: list[Verdict] = []
        while self._told:
            told = self._told.popleft()
            if isinstance(told, BaseException):
                raise told
            verdicts.append(told)
        return verdicts

    def help(self) -> bool:
        return self._can_help and self._check_lot() > 0

    def close(self) -> None:
        """What waits is checked before."""
        self.rouse()
        self._wake.put(False)
        self._thread.join()

    def _run(self) -> None:
        row, checked = self._row, 0
        row.begin(Phase.IDLE)
        try:
            while self._wake.get():
                # Before it looks: whatever is submitted from now on may rouse it again.
                self._is_roused = False
                row.enter(Phase.VERIFYING)
                row.pending(1)
                while done := self._check_lot():
                    checked += done
                    row.progress(checked)
                row.pending(0)
                row.enter(Phase.IDLE)
        except BaseException as error:
            row.end(failed=True)
            self._told.append(error)

    def _check_lot(self) -> int:
        """How many were in it. Several threads may take from the deque."""
        try:
            lot = self._asked.popleft()
        except IndexError:
            return 0
        fault_points.reach("sidecar.verify")
        self._told.append(self._checker.check(lot))
        return len(lot.items)
