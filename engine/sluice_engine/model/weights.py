"""`ModelWeights`: a checkpoint arranged as the forward pass wants it, projections of one input in one matrix."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sluice_engine.model.checkpoint import Checkpoint, Progress, no_progress
from sluice_engine.model.config import MlpKind, ModelConfig
from sluice_kernels.hyper_connect import HyperWeights
from sluice_kernels.moe import DENSE_EXPERTS, MoeWeights
from sluice_records import LayerKind


@dataclass(frozen=True, slots=True)
class CompressorWeights:
    """Columns of the layer's input projection, and the rest of one compressor."""

    kv: slice
    gate: slice
    bias: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """`inputs` stacks every projection of the normed block input: queries, KV, compressors, index weights."""

    attn_hc: HyperWeights
    ffn_hc: HyperWeights
    attn_norm: Tensor
    ffn_norm: Tensor
    inputs: Tensor
    query: slice
    kv: slice
    q_norm: Tensor
    q_b: Tensor
    kv_norm: Tensor
    sinks: Tensor
    o_a: Tensor
    o_b: Tensor
    moe: MoeWeights
    compressor: CompressorWeights | None = None
    indexer: CompressorWeights | None = None
    index_q: Tensor | None = None
    index_weights: slice | None = None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embed: Tensor
    layers: tuple[LayerWeights, ...]
    hc_head: HyperWeights
    norm: Tensor
    head: Tensor


def load_weights(directory: Path, config: ModelConfig, progress: Progress = no_progress) -> ModelWeights:
    """Raises BadWeights."""
    source = Checkpoint(directory, config, progress)
    layers = tuple(_layer(source, config, layer) for layer in range(len(config.layers)))
    return ModelWeights(
        embed=source.read("model.embed_tokens.weight"),
        layers=layers,
        hc_head=_hyper(source, "model.hc_head.hc_", config),
        norm=source.read("model.norm.weight"),
        head=source.read("lm_head.weight"),
    )


def _layer(source: Checkpoint, config: ModelConfig, layer: int) -> LayerWeights:
    prefix = f"model.layers.{layer}."
    attn = prefix + "self_attn."
    inputs = _Stack()
    query = inputs.add(source.read(attn + "q_a_proj.weight"))
    kv = inputs.add(source.read(attn + "kv_proj.weight"))
    kind = config.layers[layer]
    compressor = indexer = index_q = index_weights = None
    if kind is not LayerKind.SLIDING:
        compressor = _compressor(source, attn + "compressor.", inputs)
    if kind is LayerKind.CSA:
        index = attn + "compressor.indexer."
        indexer = _compressor(source, index, inputs)
        index_q = source.read(index + "q_b_proj.weight")
        index_weights = inputs.add(source.read(index + "scorer.weights_proj.weight"))
    o_a = source.read(attn + "o_a_proj.weight").view(config.o_groups, config.o_lora_rank, -1)
    return LayerWeights(
        attn_hc=_hyper(source, prefix + "attn_hc.", config),
        ffn_hc=_hyper(source, prefix + "ffn_hc.", config),
        attn_norm=source.read(prefix + "input_layernorm.weight"),
        ffn_norm=source.read(prefix + "post_attention_layernorm.weight"),
        inputs=inputs.matrix(),
        query=query,
        kv=kv,
        q_norm=source.read(attn + "q_a_norm.weight"),
        q_b=source.read(attn + "q_b_proj.weight"),
        kv_norm=source.read(attn + "kv_norm.weight"),
        sinks=source.read(attn + "sinks"),
        o_a=o_a,
        o_b=source.read(attn + "o_b_proj.weight"),
        moe=_moe(source, prefix + "mlp.", config, config.mlps[layer]),
        compressor=compressor,
        indexer=indexer,
        index_q=index_q,
        index_weights=index_weights,
    )


class _Stack:
    """Rows of several matrices under each other, remembering where each lies."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._rows = 0

    def add(self, part: Tensor) -> slice:
        self._parts.append(part)
        self._rows += part.shape[0]
        return slice(self._rows - part.shape[0], self._rows)

    def matrix(self) -> Tensor:
        return torch.cat(self._parts)


def _compressor(source: Checkpoint, prefix: str, inputs: _Stack) -> CompressorWeights:
    return CompressorWeights(
        kv=inputs.add(source.read(prefix + "kv_proj.weight")),
        gate=inputs.add(source.read(prefix + "gate_proj.weight")),
        bias=source.read(prefix + "position_bias"),
        norm=source.read(prefix + "kv_norm.weight"),
    )


def _hyper(source: Checkpoint, prefix: str, config: ModelConfig) -> HyperWeights:
    return HyperWeights.build(
        source.read(prefix + "fn"),
        source.read(prefix + "scale"),
        source.read(prefix + "base"),
        streams=config.hc_mult,
        iterations=config.hc_iters,
        eps=config.hc_eps,
        rms_eps=config.rms_eps,
    )


def _moe(source: Checkpoint, prefix: str, config: ModelConfig, kind: MlpKind) -> MoeWeights:
    shared = prefix + "shared_experts."
    shared_up = torch.cat([source.read(shared + "gate_proj.weight"), source.read(shared + "up_proj.weight")])
    up = torch.cat([source.read(prefix + "experts.gate_up_proj"), shared_up[None]])
    down = torch.cat([source.read(prefix + "experts.down_proj"), source.read(shared + "down_proj.weight")[None]])
    hashed = kind is MlpKind.HASH
    dense = config.experts <= DENSE_EXPERTS
    return MoeWeights(
        router=source.read(prefix + "gate.weight"),
        bias=None if hashed else source.read(prefix + "gate.e_score_correction_bias"),
        table=source.read(prefix + "gate.tid2eid") if hashed else None,
        up=up.flatten(0, 1),
        down=down,
        down_flat=down.permute(1, 0, 2).flatten(1).contiguous() if dense else None,
        experts=config.experts,
        chosen=config.experts_per_token,
        scaling=config.routed_scaling,
        limit=config.swiglu_limit,
    )
