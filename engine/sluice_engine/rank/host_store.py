"""`RecordStore` over the pools in host memory, which rank and sidecar share. Every call has its effect at once."""

from __future__ import annotations

import time
from collections.abc import Sequence

from sluice_engine.pool import Pools
from sluice_engine.rank.device import Checked, Later, RecordCopy
from sluice_engine.step import BadRecord, Check, Close, RecordRef
from sluice_records import RecordKind, Trailer


class HostStore:
    """`rank` is named in what is reported as bad."""

    def __init__(self, rank: int, pools: Pools) -> None:
        self._rank, self._pools = rank, pools

    def zero(self, refs: Sequence[RecordRef]) -> None:
        for ref in refs:
            self._pools[ref.kind].zero(ref.record)

    def claim(self, refs: Sequence[RecordRef]) -> None:
        for ref in refs:
            self._pools[ref.kind].claim(ref.record, ref.generation)

    def copy(self, copies: Sequence[RecordCopy]) -> None:
        for copy in copies:
            source, destination = self._pools[copy.source_kind], self._pools[copy.destination_kind]
            source.copy_sections(copy.source, destination, copy.destination)

    def check(self, checks: Sequence[Check]) -> Later[Checked]:
        began = time.monotonic_ns()
        bad: list[BadRecord] = []
        by_kind: dict[RecordKind, list[Check]] = {}
        for check in checks:
            by_kind.setdefault(check.ref.kind, []).append(check)
        for kind, of_kind in by_kind.items():
            pool = self._pools[kind]
            found = pool.digests([check.ref.record for check in of_kind], [check.identity for check in of_kind])
            for check, digest in zip(of_kind, found, strict=True):
                wanted = Trailer(
                    pool.layout.format_id, check.identity, check.ref.generation, check.valid_tokens, digest
                )
                if (difference := pool.difference(check.ref.record, wanted)) is not None:
                    bad.append(BadRecord(check.ref, f"rank {self._rank}: {': '.join(difference)}"))
        checked = Checked(tuple(bad), time.monotonic_ns() - began)
        return lambda: checked

    def close(self, closes: Sequence[Close]) -> Later[tuple[int, ...]]:
        places: dict[RecordKind, list[int]] = {}
        for place, close in enumerate(closes):
            places.setdefault(close.ref.kind, []).append(place)
        digests = [0] * len(closes)
        for kind, of_kind in places.items():
            pool, of_pool = self._pools[kind], [closes[place] for place in of_kind]
            found = pool.digests([close.ref.record for close in of_pool], [close.identity for close in of_pool])
            format_id = pool.layout.format_id
            for place, close, digest in zip(of_kind, of_pool, found, strict=True):
                ref, digests[place] = close.ref, digest
                trailer = Trailer(format_id, close.identity, ref.generation, close.valid_tokens, digest)
                pool.write_trailer(ref.record, trailer)
        told = tuple(digests)
        return lambda: told
