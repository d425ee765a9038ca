"""`ModelConfig`: a DeepSeek-V4 `config.json`, read without torch. Modern and legacy keys, as transformers reads them.

A field that we do not implement is refused by name; so is a field of unknown meaning. Source of names,
defaults and legacy rules: `../shared/facts/deepseek.md` 2.1 and transformers 5.24.0 `configuration_deepseek_v4.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from sluice_engine.model.errors import UnsupportedConfig
from sluice_engine.model.fields import ROPE, Fields, check_fields
from sluice_records import CacheGeometry, GeometryError, LayerKind

_BY_RATIO = {0: LayerKind.SLIDING, 4: LayerKind.CSA, 128: LayerKind.HCA}
_DTYPES = ("float32", "bfloat16")


class MlpKind(StrEnum):
    """Values as in the published `mlp_layer_types`."""

    HASH = "hash_moe"
    SCORED = "moe"


@dataclass(frozen=True, slots=True)
class Yarn:
    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True, slots=True)
class Rope:
    theta: float
    yarn: Yarn | None = None


@dataclass(frozen=True, slots=True)
class Quantization:
    """How weights lie in the files. `block`: rows and columns that share an fp8 scale."""

    block: tuple[int, int]
    scale_bytes: int
    experts_fp4: bool


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Dimensions in elements. `main_rope` is for sliding layers, `compress_rope` for all others."""

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerKind, ...]
    mlps: tuple[MlpKind, ...]
    heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    window: int
    csa_rate: int
    hca_rate: int
    index_heads: int
    index_head_dim: int
    index_topk: int
    experts: int
    experts_per_token: int
    expert_dim: int
    routed_scaling: float
    swiglu_limit: float
    hc_mult: int
    hc_iters: int
    hc_eps: float
    rms_eps: float
    main_rope: Rope
    compress_rope: Rope
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    quantization: Quantization | None = None

    def geometry(self) -> CacheGeometry:
        """Raises GeometryError (see sluice_records) for dimensions that no record can be built for."""
        return CacheGeometry(
            layers=self.layers,
            head_dim=self.head_dim,
            rope_dim=self.rope_dim,
            index_head_dim=self.index_head_dim,
            window=self.window,
            csa_rate=self.csa_rate,
            hca_rate=self.hca_rate,
        )

    def rate(self, layer: int) -> int:
        """Tokens per compressed entry of this layer; 0 where nothing is compressed."""
        rates = {LayerKind.CSA: self.csa_rate, LayerKind.HCA: self.hca_rate}
        return rates.get(self.layers[layer], 0)


def load_model_config(path: Path) -> ModelConfig:
    """From a `config.json` or the directory that holds one."""
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnsupportedConfig("config.json", f"{file} cannot be read ({error.strerror})", "name a model") from error
    except ValueError as error:
        raise UnsupportedConfig("config.json", f"{file} is not JSON ({error})", "mend the file") from error
    if not isinstance(raw, dict):
        raise UnsupportedConfig("config.json", f"{file} holds no object", "mend the file")
    return parse_model_config(raw)


def parse_model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Raises UnsupportedConfig."""
    check_fields(raw)
    f = Fields(raw)
    head_dim = f.size("head_dim", 512)
    rope_dim = _rope_dim(f, head_dim)
    layers, rates = _layers(f)
    main, compress = _ropes(f, head_dim, rope_dim)
    config = ModelConfig(
        vocab_size=f.size("vocab_size", 129280),
        hidden_size=f.size("hidden_size", 4096),
        layers=layers,
        mlps=_mlps(f),
        heads=f.size("num_attention_heads", 64),
        head_dim=head_dim,
        rope_dim=rope_dim,
        q_lora_rank=f.size("q_lora_rank", 1024),
        o_groups=f.size("o_groups", 8),
        o_lora_rank=f.size("o_lora_rank", 1024),
        window=f.size("sliding_window", 128),
        csa_rate=rates[LayerKind.CSA],
        hca_rate=rates[LayerKind.HCA],
        index_heads=f.size("index_n_heads", 64),
        index_head_dim=f.size("index_head_dim", 128),
        index_topk=f.size("index_topk", 512),
        experts=f.size("n_routed_experts", 256, "num_local_experts"),
        experts_per_token=f.size("num_experts_per_tok", 6),
        expert_dim=f.size("moe_intermediate_size", 2048),
        routed_scaling=f.number("routed_scaling_factor", 1.5),
        swiglu_limit=f.number("swiglu_limit", 10.0),
        hc_mult=f.size("hc_mult", 4),
        hc_iters=f.size("hc_sinkhorn_iters", 20),
        hc_eps=f.number("hc_eps", 1e-6),
        rms_eps=f.number("rms_norm_eps", 1e-6),
        main_rope=main,
        compress_rope=compress,
        max_position_embeddings=f.size("max_position_embeddings", 1048576),
        bos_token_id=f.optional_size("bos_token_id", 0),
        eos_token_ids=f.token_ids("eos_token_id", 1),
        dtype=_dtype(f),
        quantization=_quantization(f),
    )
    _check_divisions(config)
    return config


def _check_divisions(config: ModelConfig) -> None:
    if config.heads % config.o_groups:
        problem = f"{config.o_groups} does not divide num_attention_heads {config.heads}"
        raise UnsupportedConfig("o_groups", problem, "heads are split evenly over output groups")
    if config.experts_per_token > config.experts:
        problem = f"{config.experts_per_token} is more than the {config.experts} experts"
        raise UnsupportedConfig("num_experts_per_tok", problem, "choose at most n_routed_experts")
    if config.index_head_dim < config.rope_dim and LayerKind.CSA in config.layers:
        problem = f"{config.index_head_dim} is less than the rotary dims {config.rope_dim}"
        raise UnsupportedConfig("index_head_dim", problem, "index heads rotate as many dims as attention heads")
    try:
        config.geometry()
    except GeometryError as error:
        raise UnsupportedConfig("head_dim", str(error), "no cache record can be laid out for it") from error


def _rope_dim(f: Fields, head_dim: int) -> int:
    factor = f.optional_number("partial_rotary_factor")
    if factor is None and f.raw.get("qk_rope_head_dim") is not None:
        rope = f.size("qk_rope_head_dim", 64)
    else:
        rope = int(head_dim * (0.125 if factor is None else factor))
    if rope % 2 or rope <= 0 or rope > head_dim:
        raise UnsupportedConfig(
            "partial_rotary_factor", f"gives {rope} rotary dims of {head_dim}", "they must be even, and within head_dim"
        )
    return rope


def _layers(f: Fields) -> tuple[tuple[LayerKind, ...], dict[LayerKind, int]]:
    count = f.size("num_hidden_layers", 43)
    rates = {LayerKind.CSA: 4, LayerKind.HCA: 128}
    for name, value in f.mapping("compress_rates").items():
        if name not in (LayerKind.CSA.value, LayerKind.HCA.value):
            raise UnsupportedConfig("compress_rates", f"has a rate for {name!r}", "only CSA and HCA layers compress")
        rates[LayerKind(name)] = Fields({"compress_rates": value}).size("compress_rates", 0)
    rates[LayerKind.CSA] = f.size("compress_rate_csa", rates[LayerKind.CSA])
    rates[LayerKind.HCA] = f.size("compress_rate_hca", rates[LayerKind.HCA])
    if (names := f.names("layer_types")) is not None:
        kinds = [f.choice("layer_types", name, LayerKind) for name in names]
    elif (ratios := f.raw.get("compress_ratios")) is not None:
        kinds = _from_ratios(ratios)
    else:
        pattern = [LayerKind.CSA if i % 2 else LayerKind.HCA for i in range(max(count - 2, 0))]
        kinds = [LayerKind.HCA] * min(count, 2) + pattern
    if len(kinds) < count:
        problem = f"lists {len(kinds)} layers, num_hidden_layers is {count}"
        raise UnsupportedConfig("layer_types", problem, "name every layer")
    return tuple(kinds[:count]), rates


def _from_ratios(ratios: object) -> list[LayerKind]:
    if not isinstance(ratios, list) or any(not isinstance(r, int) or r not in _BY_RATIO for r in ratios):
        raise UnsupportedConfig(
            "compress_ratios", f"is {ratios!r}", "entries are 0, 4 or 128; give others through compress_rates"
        )
    return [_BY_RATIO[r] for r in ratios]


def _mlps(f: Fields) -> tuple[MlpKind, ...]:
    count = f.size("num_hidden_layers", 43)
    if (names := f.names("mlp_layer_types")) is not None:
        kinds = [f.choice("mlp_layer_types", name, MlpKind) for name in names]
    else:
        hashed = min(f.size("num_hash_layers", 3, zero=True), count)
        kinds = [MlpKind.HASH] * hashed + [MlpKind.SCORED] * (count - hashed)
    if len(kinds) < count:
        problem = f"lists {len(kinds)} layers, num_hidden_layers is {count}"
        raise UnsupportedConfig("mlp_layer_types", problem, "name every layer")
    return tuple(kinds[:count])


def _ropes(f: Fields, head_dim: int, rope_dim: int) -> tuple[Rope, Rope]:
    given = {**f.mapping("rope_scaling"), **f.mapping("rope_parameters")}
    for within, part in (("", given), *((f"{k}.", v) for k, v in given.items() if k in ("main", "compress"))):
        _check_rope(f"rope_parameters.{within}", part, head_dim, rope_dim)
    theta, compress_theta = f.number("rope_theta", 1e4), f.number("compress_rope_theta", 1.6e5)
    if isinstance(given.get("main"), Mapping) and isinstance(given.get("compress"), Mapping):
        main = _rope(given["main"], theta, attention_factor=0.0)
        return main, _rope(given["compress"], compress_theta, attention_factor=0.0)
    flat = {k: v for k, v in given.items() if k not in ("main", "compress", "rope_theta")}
    return Rope(theta), _rope(flat, compress_theta, attention_factor=1.0)


def _check_rope(within: str, given: object, head_dim: int, rope_dim: int) -> None:
    if not isinstance(given, Mapping):
        raise UnsupportedConfig(within.removesuffix("."), f"is {given!r}", "give an object")
    for name in given.keys() - ROPE - {"main", "compress"}:
        raise UnsupportedConfig(within + name, "is unknown here, so it cannot be honoured", "remove it")
    factor = Fields(given, within).optional_number("partial_rotary_factor")
    if factor is not None and int(head_dim * factor) != rope_dim:
        problem = f"gives {int(head_dim * factor)} rotary dims, partial_rotary_factor outside gives {rope_dim}"
        raise UnsupportedConfig(within + "partial_rotary_factor", problem, "give both the same")


def _rope(given: Mapping[str, Any], theta: float, attention_factor: float) -> Rope:
    f = Fields(given, within="rope_parameters.")
    kind = given.get("rope_type", given.get("type", "default"))
    base = f.number("rope_theta", theta)
    if kind == "default":
        return Rope(base)
    if kind != "yarn":
        raise UnsupportedConfig("rope_parameters.rope_type", f"is {kind!r}", "only default and yarn are implemented")
    if f.number("attention_factor", attention_factor) != 1.0:
        raise UnsupportedConfig(
            "rope_parameters.attention_factor", f"is {given.get('attention_factor')!r}", "DeepSeek-V4 uses exactly 1.0"
        )
    if given.get("truncate", True) is not True:
        raise UnsupportedConfig("rope_parameters.truncate", "is not true", "only truncated ramps are implemented")
    original = f.size("original_max_position_embeddings", 0)
    return Rope(base, Yarn(f.number("factor", 0.0), original, f.number("beta_fast", 32), f.number("beta_slow", 1)))


def _dtype(f: Fields) -> str:
    name = f.raw.get("dtype") or f.raw.get("torch_dtype") or "bfloat16"
    if name not in _DTYPES:
        raise UnsupportedConfig("dtype", f"is {name!r}", f"one of {list(_DTYPES)} is implemented")
    return str(name)


def _quantization(f: Fields) -> Quantization | None:
    given = f.mapping("quantization_config")
    if not given:
        if f.raw.get("expert_dtype") is not None:
            raise UnsupportedConfig("expert_dtype", "is given without quantization_config", "give both or neither")
        return None
    q = Fields(given, within="quantization_config.")
    q.must("quant_method", "fp8", "only fp8 (with fp4 experts) is implemented")
    q.must("fmt", "e4m3", "only e4m3 is implemented")
    block = given.get("weight_block_size", [128, 128])
    if not isinstance(block, list) or len(block) != 2 or any(not isinstance(b, int) or b <= 0 for b in block):
        raise UnsupportedConfig("quantization_config.weight_block_size", f"is {block!r}", "give [rows, columns]")
    experts = given.get("expert_dtype", f.raw.get("expert_dtype"))
    if experts not in (None, "fp8", "fp4"):
        raise UnsupportedConfig("expert_dtype", f"is {experts!r}", "fp8 and fp4 are implemented")
    scale_bytes = 1 if given.get("scale_fmt") == "ue8m0" else 4
    return Quantization((block[0], block[1]), scale_bytes, experts == "fp4")
