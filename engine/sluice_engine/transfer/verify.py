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
from sluice_engine.pool import Pools, RecordPool
from sluice_engine.step import PullItem
from sluice_engine.transfer.contract import Failure
from sluice_records import RecordKind, TrailerError


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
    try:
        trailer = pool.trailer(item.destination)
    except TrailerError as error:
        return _mismatch("TrailerMismatch", item, str(error))
    told = (
        ("FormatMismatch", trailer.format_id, pool.layout.format_id),
        ("GenerationMismatch", trailer.generation, item.source_generation),
        ("IdentityMismatch", trailer.identity.hex(), item.identity.hex()),
        ("ValidTokensMismatch", trailer.valid_tokens, item.valid_tokens),
        ("DigestMismatch", trailer.digest, item.digest),
    )
    for reason, found, granted in told:
        if found != granted:
            return _mismatch(reason, item, f"trailer says {found}, granted was {granted}")
    return None


def check_digest(pool: RecordPool, item: PullItem) -> Failure | None:
    found = pool.digest(item.destination, item.identity)
    if found == item.digest:
        return None
    return _mismatch("DigestMismatch", item, f"bytes digest to {found:#018x}, granted was {item.digest:#018x}")


def _mismatch(reason: str, item: PullItem, detail: str) -> Failure:
    return Failure(reason, f"{item.kind.value} record {item.destination} from {item.source}: {detail}")


class Verifier(Protocol):
    def submit(self, serial: int, items: Sequence[PullItem]) -> None: ...

    def collect(self) -> list[Verdict]:
        """Verdicts since the last call; never waits. Raises what ended the verifier, if anything did."""
        ...

    def close(self) -> None: ...


class _Checker:
    def __init__(self, pools: Pools, policy: VerifyPolicy) -> None:
        self._pools, self._policy = pools, policy
        self._pages = 0

    def check(self, serial: int, item: PullItem) -> Verdict:
        pool = self._pools[item.kind]
        failure, due = check_trailer(pool, item), self._is_due(item)
        if failure is None and due:
            failure = check_digest(pool, item)
        return Verdict(serial, item, failure, due)

    def _is_due(self, item: PullItem) -> bool:
        if item.kind is not RecordKind.PAGE or self._policy.level is VerifyLevel.FULL:
            return True
        self._pages += 1
        return self._pages % self._policy.every == 1 % self._policy.every


class SliceVerifier:
    """In the caller's thread, a few records a call."""

    def __init__(self, pools: Pools, policy: VerifyPolicy = VerifyPolicy(), records_per_call: int = 4) -> None:
        self._checker, self._slice = _Checker(pools, policy), records_per_call
        self._waiting: deque[tuple[int, PullItem]] = deque()

    def submit(self, serial: int, items: Sequence[PullItem]) -> None:
        self._waiting.extend((serial, item) for item in items)

    def collect(self) -> list[Verdict]:
        count = min(self._slice, len(self._waiting))
        return [self._checker.check(*self._waiting.popleft()) for _ in range(count)]

    def close(self) -> None:
        self._waiting.clear()


class ThreadVerifier:
    """In a thread of its own: numpy sums without the interpreter's lock, so copying goes on meanwhile."""

    def __init__(self, pools: Pools, policy: VerifyPolicy = VerifyPolicy(), row: Row | None = None) -> None:
        """`row`: this thread's; what is pending in it is said by whoever submits and collects."""
        self._checker = _Checker(pools, policy)
        self._row = row or unrecorded("verifier")
        self._submitted = self._collected = 0
        self._asked: queue.SimpleQueue[tuple[int, PullItem] | None] = queue.SimpleQueue()
        self._told: queue.SimpleQueue[Verdict | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sluice-verify", daemon=True)
        self._thread.start()

    def submit(self, serial: int, items: Sequence[PullItem]) -> None:
        self._submitted += len(items)
        self._row.pending(self._submitted - self._collected)
        for item in items:
            self._asked.put((serial, item))

    def collect(self) -> list[Verdict]:
        verdicts: list[Verdict] = []
        while not self._told.empty():
            told = self._told.get()
            if isinstance(told, BaseException):
                raise told
            verdicts.append(told)
        if verdicts:
            self._collected += len(verdicts)
            self._row.pending(self._submitted - self._collected)
        return verdicts

    def close(self) -> None:
        self._asked.put(None)
        self._thread.join()

    def _run(self) -> None:
        self._row.begin(Phase.VERIFYING)
        verified = 0
        try:
            while (asked := self._asked.get()) is not None:
                hooks.reach("sidecar.verify")
                self._told.put(self._checker.check(*asked))
                verified += 1
                self._row.progress(verified)
        except BaseException as error:
            self._row.end(failed=True)
            self._told.put(error)
