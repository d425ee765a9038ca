"""Which tensors a checkpoint of a config has: names (as transformers' modules have them), shapes, formats. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from sluice_engine.model.config import MlpKind, ModelConfig
from sluice_records import LayerKind


class Part(StrEnum):
    EMBEDDING = "embedding"
    ATTENTION = "attention"
    COMPRESSOR = "compressors"
    INDEXER = "indexers"
    ROUTER = "routers"
    EXPERTS = "routed experts"
    SHARED = "shared experts"
    HYPER = "hyper-connections"
    NORMS = "norms"
    HEAD = "head"


class Stored(StrEnum):
    """How a tensor lies in the files when the checkpoint is quantised, and the dtype it keeps otherwise."""

    MODEL = "model dtype"
    FLOAT = "float32"
    INTEGER = "int64"
    BLOCK_FP8 = "fp8 blocks"
    EXPERT = "expert format"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    name: str
    shape: tuple[int, ...]
    part: Part
    stored: Stored = Stored.MODEL
    below: int = 0  # of INTEGER ones: ids are less

    @property
    def parameters(self) -> int:
        return math.prod(self.shape)


def expected_tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor; routed experts as one tensor each for gate and up, and down."""
    d, vocab = config.hidden_size, config.vocab_size
    yield TensorSpec("model.embed_tokens.weight", (vocab, d), Part.EMBEDDING)
    for layer in range(len(config.layers)):
        prefix = f"model.layers.{layer}."
        yield TensorSpec(prefix + "input_layernorm.weight", (d,), Part.NORMS, Stored.FLOAT)
        yield TensorSpec(prefix + "post_attention_layernorm.weight", (d,), Part.NORMS, Stored.FLOAT)
        yield from _hyper(prefix + "attn_hc.", config)
        yield from _hyper(prefix + "ffn_hc.", config)
        yield from _attention(prefix + "self_attn.", config, config.layers[layer])
        yield from _mlp(prefix + "mlp.", config, config.mlps[layer])
    streams = config.hc_mult
    yield TensorSpec("model.hc_head.hc_fn", (streams, streams * d), Part.HYPER, Stored.FLOAT)
    yield TensorSpec("model.hc_head.hc_base", (streams,), Part.HYPER, Stored.FLOAT)
    yield TensorSpec("model.hc_head.hc_scale", (1,), Part.HYPER, Stored.FLOAT)
    yield TensorSpec("model.norm.weight", (d,), Part.NORMS, Stored.FLOAT)
    yield TensorSpec("lm_head.weight", (vocab, d), Part.HEAD)


def _hyper(prefix: str, config: ModelConfig) -> Iterator[TensorSpec]:
    streams = config.hc_mult
    rows = (2 + streams) * streams
    yield TensorSpec(prefix + "fn", (rows, streams * config.hidden_size), Part.HYPER, Stored.FLOAT)
    yield TensorSpec(prefix + "base", (rows,), Part.HYPER, Stored.FLOAT)
    yield TensorSpec(prefix + "scale", (3,), Part.HYPER, Stored.FLOAT)


def _attention(prefix: str, config: ModelConfig, kind: LayerKind) -> Iterator[TensorSpec]:
    d, rank, width = config.hidden_size, config.q_lora_rank, config.heads * config.head_dim
    fp8 = Stored.BLOCK_FP8
    yield TensorSpec(prefix + "q_a_proj.weight", (rank, d), Part.ATTENTION, fp8)
    yield TensorSpec(prefix + "q_a_norm.weight", (rank,), Part.NORMS, Stored.FLOAT)
    yield TensorSpec(prefix + "q_b_proj.weight", (width, rank), Part.ATTENTION, fp8)
    yield TensorSpec(prefix + "kv_proj.weight", (config.head_dim, d), Part.ATTENTION, fp8)
    yield TensorSpec(prefix + "kv_norm.weight", (config.head_dim,), Part.NORMS, Stored.FLOAT)
    groups = config.o_groups * config.o_lora_rank
    yield TensorSpec(prefix + "o_a_proj.weight", (groups, width // config.o_groups), Part.ATTENTION, fp8)
    yield TensorSpec(prefix + "o_b_proj.weight", (d, groups), Part.ATTENTION, fp8)
    yield TensorSpec(prefix + "sinks", (config.heads,), Part.ATTENTION, Stored.FLOAT)
    if kind is LayerKind.HCA:
        yield from _compressor(prefix + "compressor.", config.hca_rate, config.head_dim, 1, d, Part.COMPRESSOR)
    if kind is LayerKind.CSA:
        yield from _compressor(prefix + "compressor.", config.csa_rate, config.head_dim, 2, d, Part.COMPRESSOR)
        index = prefix + "compressor.indexer."
        yield from _compressor(index, config.csa_rate, config.index_head_dim, 2, d, Part.INDEXER)
        queries = config.index_heads * config.index_head_dim
        yield TensorSpec(index + "q_b_proj.weight", (queries, rank), Part.INDEXER, fp8)
        yield TensorSpec(index + "scorer.weights_proj.weight", (config.index_heads, d), Part.INDEXER)


def _compressor(prefix: str, rate: int, dim: int, halves: int, hidden: int, part: Part) -> Iterator[TensorSpec]:
    yield TensorSpec(prefix + "kv_proj.weight", (halves * dim, hidden), part)
    yield TensorSpec(prefix + "gate_proj.weight", (halves * dim, hidden), part)
    yield TensorSpec(prefix + "position_bias", (rate, halves * dim), part, Stored.FLOAT)
    yield TensorSpec(prefix + "kv_norm.weight", (dim,), Part.NORMS, Stored.FLOAT)


def _mlp(prefix: str, config: ModelConfig, kind: MlpKind) -> Iterator[TensorSpec]:
    d, width, experts = config.hidden_size, config.expert_dim, config.experts
    yield TensorSpec(prefix + "gate.weight", (experts, d), Part.ROUTER)
    if kind is MlpKind.HASH:
        shape = (config.vocab_size, config.experts_per_token)
        yield TensorSpec(prefix + "gate.tid2eid", shape, Part.ROUTER, Stored.INTEGER, below=experts)
    else:
        yield TensorSpec(prefix + "gate.e_score_correction_bias", (experts,), Part.ROUTER, Stored.FLOAT)
    yield TensorSpec(prefix + "experts.gate_up_proj", (experts, 2 * width, d), Part.EXPERTS, Stored.EXPERT)
    yield TensorSpec(prefix + "experts.down_proj", (experts, d, width), Part.EXPERTS, Stored.EXPERT)
    for name, shape in (("gate_proj", (width, d)), ("up_proj", (width, d)), ("down_proj", (d, width))):
        yield TensorSpec(prefix + f"shared_experts.{name}.weight", shape, Part.SHARED, Stored.BLOCK_FP8)


@dataclass(frozen=True, slots=True)
class WeightCounts:
    """`parameters` by part; bytes of all tensors as the checkpoint's files hold them, and as we hold them loaded."""

    parameters: dict[Part, int]
    file_bytes: int
    loaded_bytes: int

    @property
    def total(self) -> int:
        return sum(self.parameters.values())


def weight_counts(config: ModelConfig) -> WeightCounts:
    """Multi-token prediction weights are not counted: they are not loaded."""
    parameters: dict[Part, int] = {}
    in_files = loaded = 0
    for spec in expected_tensors(config):
        parameters[spec.part] = parameters.get(spec.part, 0) + spec.parameters
        plain = spec.parameters * _PLAIN_BYTES.get(spec.stored, _MODEL_BYTES[config.dtype])
        loaded += plain
        in_files += _quantised_bytes(spec, config) if config.quantization and spec.stored in _QUANTISED else plain
    return WeightCounts(parameters, in_files, loaded)


_MODEL_BYTES = {"float32": 4, "bfloat16": 2}
_PLAIN_BYTES = {Stored.FLOAT: 4, Stored.INTEGER: 8}
_QUANTISED = frozenset({Stored.BLOCK_FP8, Stored.EXPERT})
# Values that share a scale in a row of packed fp4.
_FP4_BLOCK = 32


def _quantised_bytes(spec: TensorSpec, config: ModelConfig) -> int:
    assert config.quantization is not None
    if spec.stored is Stored.EXPERT and config.quantization.experts_fp4:
        rows = math.prod(spec.shape[:-1])
        return spec.parameters // 2 + rows * -(-spec.shape[-1] // _FP4_BLOCK)
    block_rows, block_columns = config.quantization.block
    blocks = -(-spec.shape[-2] // block_rows) * -(-spec.shape[-1] // block_columns)
    return spec.parameters + math.prod(spec.shape[:-2]) * blocks * config.quantization.scale_bytes
