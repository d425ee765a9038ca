"""After arrival, before commit: is this the record that was granted? Trailer always, digest by level; never nothing."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from sluice_engine import hooks
from sluice_engine.health.layout import Phase
from sluice_engine.health.recorder import Row, unrecorded
from sluice_engine.pool import LOT_BYTES, Pools, RecordPool
from sluice_engine.step import PullItem
from sluice_engine.transfer.contract import Failure
from sluice_engine.transfer.plan import PIECE_BYTES
from sluice_records import RecordKind, Trailer, TrailerError


class VerifyLevel(StrEnum):
    """FULL: every digest. SAMPLE: digests of all states and snapshots, and of every k-th page. Trailers: always."""

    FULL = "full"
    SAMPLE = "sample"


@dataclass(frozen=True, slots=True)
class VerifyPolicy:
    level: VerifyLevel = VerifyLevel.FULL
    every: int = 8


@dataclass(frozen=True, slots=True)
class Verdict:
    """`serial` is the puller's number of the pull that asked."""

    serial: int
    item: PullItem
    failure: Failure | None
    digested: bool


def check_trailer(pool: RecordPool, item: PullItem) -> Failure | None:
    granted = Trailer(pool.layout.format_id, item.identity, item.source_generation, item.valid_tokens, item.digest)
    return None if pool.has_trailer(item.destination, granted) else _explain(pool, item, granted)


def _explain(pool: RecordPool, item: PullItem, granted: Trailer) -> Failure:
    """Which field of a trailer that is not the granted one differs first."""
    try:
        found = pool.trailer(item.destination)
    except TrailerError as error:
        return _mismatch("TrailerMismatch", item, str(error))
    fields = (
        ("FormatMismatch", found.format_id, granted.format_id),
        ("GenerationMismatch", found.generation, granted.generation),
        ("IdentityMismatch", found.identity.hex(), granted.identity.hex()),
        ("ValidTokensMismatch", found.valid_tokens, granted.valid_tokens),
        ("DigestMismatch", found.digest, granted.digest),
    )
    reason, told, wanted = next(field for field in fields if field[1] != field[2])
    return _mismatch(reason, item, f"trailer says {told}, granted was {wanted}")


def check_digests(pool: RecordPool, items: Sequence[PullItem]) -> list[Failure | None]:
    found = pool.digests([item.destination for item in items], [item.identity for item in items])
    return [
        None if digest == item.digest else _mismatch("DigestMismatch", item, _differ(digest, item.digest))
        for digest, item in zip(found, items, strict=True)
    ]


def _differ(found: int, granted: int) -> str:
    return f"bytes digest to {found:#018x}, granted was {granted:#018x}"


def _mismatch(reason: str, item: PullItem, detail: str) -> Failure:
    return Failure(reason, f"{item.kind.value} record {item.destination} from {item.source}: {detail}")


class Verifier(Protocol):
    def submit(self, serial: int, items: Sequence[PullItem]) -> None: ...

    def collect(self) -> list[Verdict]:
        """Verdicts since the last call; never waits. Raises what ended the verifier, if anything did."""
        ...

    def help(self) -> bool:
        """Check some records that wait, in the caller's thread, for at most as long as a piece is digested. False:
        there was none. Their verdicts come with `collect`."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Check:
    """`due`: the digest too."""

    serial: int
    item: PullItem
    due: bool


class _Checker:
    def __init__(self, pools: Pools, policy: VerifyPolicy) -> None:
        self._pools, self._policy = pools, policy
        self._pages = 0

    def plan(self, serial: int, items: Sequence[PullItem]) -> list[_Check]:
        """In one thread only: it counts pages."""
        return [_Check(serial, item, self._is_due(item)) for item in items]

    def check(self, lot: Sequence[_Check]) -> list[Verdict]:
        """One of each, in no order. In any thread."""
        verdicts: list[Verdict] = []
        for kind in {asked.item.kind for asked in lot}:
            pool, of_kind = self._pools[kind], [asked for asked in lot if asked.item.kind is kind]
            trailers = [check_trailer(pool, asked.item) for asked in of_kind]
            fine = [asked for asked, failure in zip(of_kind, trailers, strict=True) if failure is None and asked.due]
            digests = iter(check_digests(pool, [asked.item for asked in fine]) if fine else ())
            for asked, failure in zip(of_kind, trailers, strict=True):
                told = next(digests) if failure is None and asked.due else failure
                verdicts.append(Verdict(asked.serial, asked.item, told, asked.due))
        return verdicts

    def take(self, waiting: deque[_Check], lot_bytes: int) -> list[_Check]:
        """From its front, until they are `lot_bytes` or more in all. Several threads may take from one deque."""
        lot: list[_Check] = []
        while lot_bytes > 0:
            try:
                asked = waiting.popleft()
            except IndexError:
                break
            lot.append(asked)
            lot_bytes -= self._pools[asked.item.kind].layout.record_bytes
        return lot

    def _is_due(self, item: PullItem) -> bool:
        if item.kind is not RecordKind.PAGE or self._policy.level is VerifyLevel.FULL:
            return True
        self._pages += 1
        return self._pages % self._policy.every == 1 % self._policy.every


class SliceVerifier:
    """In the caller's thread, a few records a call."""

    def __init__(self, pools: Pools, policy: VerifyPolicy = VerifyPolicy(), records_per_call: int = 4) -> None:
        self._checker, self._slice = _Checker(pools, policy), records_per_call
        self._waiting: deque[_Check] = deque()

    def submit(self, serial: int, items: Sequence[PullItem]) -> None:
        self._waiting.extend(self._checker.plan(serial, items))

    def collect(self) -> list[Verdict]:
        count = min(self._slice, len(self._waiting))
        return self._checker.check([self._waiting.popleft() for _ in range(count)])

    def help(self) -> bool:
        return False

    def close(self) -> None:
        self._waiting.clear()


class ThreadVerifier:
    """In a thread of its own: numpy sums without the interpreter's lock, so copying goes on meanwhile."""

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
        # Deques need no lock. One wake for all that is submitted at once, for a wake costs more than a trailer's check.
        self._asked: deque[_Check] = deque()
        self._told: deque[Verdict | BaseException] = deque()
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._can_help = all(pool.layout.record_bytes <= PIECE_BYTES for pool in pools.values())
        self._thread = threading.Thread(target=self._run, name="sluice-verify", daemon=True)
        self._thread.start()

    def submit(self, serial: int, items: Sequence[PullItem]) -> None:
        self._asked += self._checker.plan(serial, items)
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
        self._wake.put(False)
        self._thread.join()

    def _run(self) -> None:
        row, checked = self._row, 0
        row.begin(Phase.IDLE)
        try:
            while self._wake.get():
                row.enter(Phase.VERIFYING)
                row.pending(1)
                hooks.reach("sidecar.verify")
                while done := self._check_lot():
                    checked += done
                    row.progress(checked)
                row.pending(0)
                row.enter(Phase.IDLE)
        except BaseException as error:
            row.end(failed=True)
            self._told.append(error)

    def _check_lot(self) -> int:
        """How many were in it."""
        lot = self._checker.take(self._asked, self._lot_bytes)
        self._told += self._checker.check(lot)
        return len(lot)
