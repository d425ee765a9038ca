"""The verifier's thread and whoever helps it: every record is checked once, by one of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from transfer_double import PAGE, big_layouts, fill, item, new_pools, tiny_layouts

from sluice_engine.pool import RecordPool
from sluice_engine.step import PullItem
from sluice_engine.transfer.plan import PIECE_BYTES
from sluice_engine.transfer.verify import ThreadVerifier, Verdict
from sluice_records import PoolPlan, RecordKind, Trailer
from sluice_runtime.health.recorder import unrecorded

LIMIT_S = 20.0


class SlowPool(RecordPool):
    """A lot that `slow` is in takes until `go`; `begun` says that somebody is at it."""

    slow = 0
    begun, go = threading.Event(), threading.Event()

    def digests(self, records: Sequence[int], identities: Sequence[bytes]) -> list[int]:
        if self.slow in records:
            self.begun.set()
            assert self.go.wait(LIMIT_S)
        return super().digests(records, identities)


@pytest.fixture
def pools() -> Iterator[dict[RecordKind, RecordPool]]:
    pools = new_pools(tiny_layouts(perturbed=True))
    fill(pools)
    page = pools[PAGE]
    SlowPool.begun, SlowPool.go = threading.Event(), threading.Event()
    pools[PAGE] = SlowPool(page.layout, page.num_records, page.buffer)
    yield pools
    SlowPool.go.set()


def test_a_helper_takes_what_waits_and_each_record_has_one_verdict(pools: dict[RecordKind, RecordPool]) -> None:
    verifier = ThreadVerifier(pools, lot_bytes=1)
    verifier.submit(1, [item(pools, PAGE, record, record) for record in range(4)])
    assert SlowPool.begun.wait(LIMIT_S)
    assert [verifier.help() for _ in range(4)] == [True, True, True, False]
    assert destinations(verifier.collect()) == [1, 2, 3]
    SlowPool.go.set()
    verifier.close()
    assert destinations(verifier.collect()) == [0]


def test_a_small_lot_waits_for_a_helper_until_somebody_is_roused(pools: dict[RecordKind, RecordPool]) -> None:
    """Whoever submits it goes on to help; the thread would be woken for less than the waking costs."""
    SlowPool.go.set()
    row = unrecorded("verifier")
    verifier = ThreadVerifier(pools, row=row)
    verifier.submit(1, [item(pools, PAGE, record, record) for record in range(4)])
    assert verifier._wake.empty()
    assert verifier.help()
    assert destinations(verifier.collect()) == [0, 1, 2, 3]
    verifier.submit(2, [item(pools, PAGE, 5, 5)])
    verifier.rouse()
    told: list[Verdict] = []
    end = time.monotonic() + LIMIT_S
    while not told and time.monotonic() < end:
        told = verifier.collect()
        time.sleep(0.001)
    assert destinations(told) == [5]
    verifier.close()


def test_the_thread_is_woken_for_more_than_a_helper_checks_at_once(pools: dict[RecordKind, RecordPool]) -> None:
    size = pools[PAGE].layout.record_bytes
    verifier = ThreadVerifier(pools, lot_bytes=3 * size)
    verifier.submit(1, [item(pools, PAGE, record, record) for record in range(4)])
    assert SlowPool.begun.wait(LIMIT_S)
    SlowPool.go.set()
    verifier.close()
    assert sorted(destinations(verifier.collect())) == [0, 1, 2, 3]


def test_damage_is_found_by_a_helper_too(pools: dict[RecordKind, RecordPool]) -> None:
    verifier = ThreadVerifier(pools, lot_bytes=1)
    items = [item(pools, PAGE, record, record) for record in range(2)]
    pools[PAGE].record(1)[0] ^= 1
    verifier.submit(1, items)
    assert SlowPool.begun.wait(LIMIT_S)
    assert verifier.help()
    (verdict,) = verifier.collect()
    ((_, failure),) = verdict.failures
    assert failure.reason == "DigestMismatch"
    SlowPool.go.set()
    verifier.close()


def test_small_records_are_checked_together_and_fail_alone() -> None:
    pools = new_pools(tiny_layouts(perturbed=True))
    fill(pools)
    items = [item(pools, PAGE, record, record) for record in range(4)] + [item(pools, RecordKind.STATE, 0, 0)]
    pools[PAGE].record(1)[0] ^= 1
    pools[PAGE].write_trailer(2, Trailer(pools[PAGE].layout.format_id, bytes(16), 3, 8, 0))
    verifier = ThreadVerifier(pools)
    verifier.submit(1, items)
    verifier.close()
    (verdict,) = verifier.collect()
    assert list(verdict.lot.items) == list(verdict.lot.due) == items
    reasons = {item: failure.reason for item, failure in verdict.failures}
    assert reasons == {items[1]: "DigestMismatch", items[2]: "IdentityMismatch"}


def test_nobody_helps_with_records_that_take_longer_than_a_piece() -> None:
    pools = new_pools(big_layouts(PIECE_BYTES // 1024 + 1024), PoolPlan(2, 1, 1))
    verifier = ThreadVerifier(pools)
    verifier.close()
    verifier.submit(1, [PullItem(PAGE, 0, 1, 0, bytes(16), 0, 8)])
    assert not verifier.help()
    assert not verifier.collect()


def destinations(verdicts: list[Verdict]) -> list[int]:
    assert not any(verdict.failures for verdict in verdicts)
    assert all(verdict.lot.due == verdict.lot.items for verdict in verdicts)
    return [item.destination for verdict in verdicts for item in verdict.lot.items]
