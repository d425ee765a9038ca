"""An engine's spec, resolved into layouts, pools, limits and a fingerprint."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from sluice_engine.fingerprint import OnRead, config_digest, revision_digest, unheard
from sluice_engine.limits import Limits
from sluice_engine.model.config import load_model_config
from sluice_engine.transfer.verify import VerifyLevel, VerifyPolicy
from sluice_protocol.engine_spec import EngineSpec, SnapshotPolicy
from sluice_protocol.fingerprint import Fingerprint
from sluice_protocol.generate import Role
from sluice_records import (
    BudgetError,
    CacheGeometry,
    CachePrecision,
    GeometryError,
    LayerKind,
    Layouts,
    Perturbation,
    PoolPlan,
    RecordKind,
    build_layouts,
    plan_pools,
)
from sluice_runtime.errors import SpecError

# Changes whenever two engines of different builds would not compute the same bytes.
ENGINE_PROTOCOL = "1"
# One sliding, one CSA and one HCA layer: records with every kind of section.
SCRIPTED_GEOMETRY = CacheGeometry((LayerKind.SLIDING, LayerKind.CSA, LayerKind.HCA), 32, 8, 16, 8, 4, 16)


@dataclass(frozen=True)
class ResolvedEngine:
    """What follows from a spec and the files it names. `facts`: those of the fingerprint, the weights aside. `on_read`
    hears of the weights' bytes while the fingerprint is made of them."""

    spec: EngineSpec
    layouts: Layouts
    pools: PoolPlan
    limits: Limits
    facts: tuple[tuple[str, str], ...]
    on_read: OnRead = unheard

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Reads the weights: of an engine's processes only the leader asks."""
        return Fingerprint.of(dict(self.facts) | {"model": _revision(self.spec, self.on_read)})


def load_spec(path: Path) -> EngineSpec:
    try:
        return msgspec.json.decode(path.read_bytes(), type=EngineSpec)
    except (OSError, msgspec.DecodeError) as error:
        raise SpecError(f"engine spec {path}: {error}") from error


def resolve(spec: EngineSpec, on_read: OnRead = unheard) -> ResolvedEngine:
    """Raises SpecError (or the model's own error) that names the field and the remedy."""
    device_class = _device_class(spec.device)
    geometry, vocab_size, max_context, dtype = _read_model(spec)
    page_tokens = spec.page_tokens or default_page_tokens(geometry)
    try:
        precision = CachePrecision.parse(spec.precision or dtype)
        perturbation = None if spec.perturb is None else Perturbation(spec.perturb)
        layouts = build_layouts(geometry, precision, page_tokens, perturbation=perturbation)
    except (GeometryError, ValueError) as error:
        raise SpecError(str(error)) from error
    limits = _limits(spec, page_tokens, vocab_size, max_context)
    try:
        pools = _pools(spec, layouts, limits)
    except BudgetError as error:
        raise SpecError(str(error)) from error
    facts = {f"layout.{kind.value}": layouts[kind].format_id for kind in RecordKind} | {
        "dtype": dtype,
        "page_tokens": str(page_tokens),
        "engine_protocol": ENGINE_PROTOCOL,
        "precision": str(precision),
        "device": device_class,
    }
    return ResolvedEngine(spec, layouts, pools, limits, tuple(facts.items()), on_read)


def _device_class(device: str) -> str:
    """What decides the bits of a result: equal programs on devices of one class compute equal bytes."""
    if device != "cpu":
        raise SpecError(f"device is {device!r}: this build computes on 'cpu' only")
    return device


def default_page_tokens(geometry: CacheGeometry) -> int:
    """256 for the published rates; the smallest multiple from 16 on for tiny ones."""
    least = 256 if geometry.page_multiple > 32 else 16
    return -(-least // geometry.page_multiple) * geometry.page_multiple


def _read_model(spec: EngineSpec) -> tuple[CacheGeometry, int, int, str]:
    """(geometry, vocabulary size, longest context, precision of the weights)."""
    if spec.scripted is not None:
        geometry = SCRIPTED_GEOMETRY
        if spec.scripted.config:
            geometry = load_model_config(Path(spec.scripted.config)).geometry()
        return geometry, spec.scripted.vocab_size, 1 << 20, "fp32"
    if not spec.model:
        raise SpecError("neither model nor scripted is set: name a model directory")
    directory = Path(spec.model)
    config = load_model_config(directory)
    dtype = {"float32": "fp32", "bfloat16": "bf16"}.get(config.dtype)
    if dtype is None:
        raise SpecError(f"dtype {config.dtype!r} of {directory} has no record precision of its own: set precision")
    return config.geometry(), config.vocab_size, config.max_position_embeddings, dtype


def _revision(spec: EngineSpec, on_read: OnRead) -> str:
    if spec.scripted is not None:
        return f"scripted:{config_digest(msgspec.json.encode(spec.scripted))}"
    return revision_digest(Path(spec.model), on_read)


def _limits(spec: EngineSpec, page_tokens: int, vocab_size: int, max_context: int) -> Limits:
    # A scripted token costs nothing: what a small chunk would measure is grants.
    chunk = spec.chunk_tokens or (32 if spec.scripted is not None else 4) * page_tokens
    longest = spec.max_context_tokens or min(max_context, 8192)
    if longest > max_context:
        raise SpecError(f"max_context_tokens is {longest}; the model's own limit is {max_context}")
    try:
        return Limits(
            page_tokens=page_tokens,
            chunk_tokens=chunk,
            step_tokens=spec.step_tokens or 2 * chunk + spec.max_running,
            max_running=spec.max_running,
            max_context_tokens=longest,
            vocab_size=vocab_size,
            snapshots=SnapshotPolicy.NEVER if spec.role is Role.DECODE else spec.snapshots,
            snapshot_outputs=spec.snapshot_outputs and spec.role is Role.UNIFIED,
            check_every=1 if VerifyLevel(spec.verify) is VerifyLevel.FULL else VerifyPolicy().every,
        )
    except ValueError as error:
        raise SpecError(str(error)) from error


def _pools(spec: EngineSpec, layouts: Layouts, limits: Limits) -> PoolPlan:
    """As many pages as the memory holds, and no more than all rows at full length could use."""
    states, snapshots = spec.max_running, spec.max_running
    most = PoolPlan(limits.pages_for(limits.max_context_tokens) * spec.max_running, states, snapshots)
    memory = spec.memory_bytes or min(most.nbytes(layouts), 512 << 20)
    plan = plan_pools(layouts, memory, states=states, snapshots=snapshots)
    return PoolPlan(min(plan.pages, most.pages), states, snapshots)
