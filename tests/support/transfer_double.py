"""Pools full of real records, and sources and readers made of them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from sluice_engine.pool import Pools, RecordPool, create_memory, map_pools
from sluice_engine.step import PullItem
from sluice_engine.transfer.plan import pool_info
from sluice_protocol.fingerprint import Fingerprint
from sluice_protocol.source import SourceHello
from sluice_records import (
    CacheGeometry,
    CachePrecision,
    LayerKind,
    Layouts,
    Perturbation,
    PoolPlan,
    RecordKind,
    Trailer,
    build_layouts,
)

GEOMETRY = CacheGeometry((LayerKind.SLIDING, LayerKind.CSA, LayerKind.HCA), 16, 8, 8, 4, 4, 8)
PAGE, STATE, SNAPSHOT = RecordKind
PLAN = PoolPlan(40, 6, 4)
KEY = bytes(range(32))


def tiny_layouts(*, perturbed: bool = False) -> Layouts:
    return build_layouts(GEOMETRY, CachePrecision.parse("fp32"), 8, perturbation=Perturbation(3) if perturbed else None)


def big_layouts(page_kib: int = 950) -> Layouts:
    """Pages of about `page_kib` KiB: the record size of a Flash-like model in bf16, 256 tokens a page."""
    per_layer = 256 // 4 * (512 + 128) * 2
    layers = (LayerKind.CSA,) * max(1, page_kib * 1024 // per_layer)
    geometry = CacheGeometry(layers, 512, 64, 128, 128, 4, 128)
    return build_layouts(geometry, CachePrecision.parse("bf16"), 256)


def new_pools(layouts: Layouts, plan: PoolPlan = PLAN) -> dict[RecordKind, RecordPool]:
    return {
        kind: RecordPool(layouts[kind], plan[kind], np.zeros(plan[kind] * layouts[kind].stride, dtype=np.uint8))
        for kind in RecordKind
    }


def new_memory(layouts: Layouts, plan: PoolPlan = PLAN) -> tuple[int, dict[RecordKind, RecordPool]]:
    """(memfd, pools over it)."""
    fd = create_memory(layouts, plan, "test")
    return fd, map_pools(fd, layouts, plan)


def identity_of(kind: RecordKind, record: int) -> bytes:
    return f"{kind.value}-{record}".encode().ljust(16, b".")


def fill(pools: Pools, seed: int = 1, generation: int = 3) -> None:
    """Every record gets random content, a trailer and, in the slack behind it, bytes that must never move."""
    random = np.random.default_rng(seed)
    for pool in pools.values():
        pool.buffer[:] = random.integers(0, 256, len(pool.buffer), dtype=np.uint8)
        for record in range(pool.num_records):
            close(pool, record, generation)


def close(pool: RecordPool, record: int, generation: int) -> None:
    identity = identity_of(pool.layout.kind, record)
    digest = pool.digest(record, identity)
    pool.write_trailer(record, Trailer(pool.layout.format_id, identity, generation, 8, digest))


def item(pools: Pools, kind: RecordKind, source: int, destination: int) -> PullItem:
    """What a source grants for its record, with the destination chosen."""
    trailer = pools[kind].trailer(source)
    return PullItem(
        kind, source, trailer.generation, destination, trailer.identity, trailer.digest, trailer.valid_tokens
    )


def page_items(pools: Pools, pairs: Sequence[tuple[int, int]]) -> tuple[PullItem, ...]:
    return tuple(item(pools, PAGE, source, destination) for source, destination in pairs)


def hello(pools: Pools, incarnation: str = "source.1", transport: str = "memory", name: str = "") -> SourceHello:
    infos = tuple(pool_info(pool.layout, pool.num_records) for pool in pools.values())
    return SourceHello(
        Fingerprint.of({"model": "tiny"}), incarnation, infos, transport, name or incarnation, b"", os.getpid()
    )


def same_records(source: Pools, destination: Pools, items: Sequence[PullItem]) -> bool:
    return all(
        np.array_equal(source[it.kind].record(it.source), destination[it.kind].record(it.destination)) for it in items
    )
