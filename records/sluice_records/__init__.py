"""The bytes of a cache record, described once: layout, formats, budget, identity and digest. Without torch."""

from sluice_records.budget import BudgetError, PoolPlan, SequenceCost, plan_pools, sequence_cost
from sluice_records.chain import ChainKey, block_keys, extend_chain, record_identity
from sluice_records.digest import record_digest, record_digests
from sluice_records.formats import CachePrecision, IndexFormat, KvFormat, Plane, PlaneFormat, index_planes, kv_planes
from sluice_records.geometry import CacheGeometry, GeometryError, LayerKind
from sluice_records.layout import (
    Layouts,
    Perturbation,
    RecordKind,
    RecordLayout,
    Section,
    SectionKind,
    build_layouts,
)
from sluice_records.trailer import TRAILER_BYTES, Trailer, TrailerError, set_generation

__all__ = [
    "TRAILER_BYTES",
    "BudgetError",
    "CacheGeometry",
    "CachePrecision",
    "ChainKey",
    "GeometryError",
    "IndexFormat",
    "KvFormat",
    "LayerKind",
    "Layouts",
    "Perturbation",
    "Plane",
    "PlaneFormat",
    "PoolPlan",
    "RecordKind",
    "RecordLayout",
    "Section",
    "SectionKind",
    "SequenceCost",
    "Trailer",
    "TrailerError",
    "block_keys",
    "build_layouts",
    "extend_chain",
    "index_planes",
    "kv_planes",
    "plan_pools",
    "record_digest",
    "record_digests",
    "record_identity",
    "sequence_cost",
    "set_generation",
]
