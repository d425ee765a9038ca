"""Configs in modern and legacy keys mean what transformers says; what we cannot honour is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sluice_engine.model.config import MlpKind, load_model_config, parse_model_config
from sluice_engine.model.errors import UnsupportedConfig
from sluice_records import LayerKind


def test_modern_and_legacy_keys_mean_the_same() -> None:
    modern = parse_model_config(
        {
            "num_hidden_layers": 4,
            "layer_types": [kind.value for kind in (LayerKind.SLIDING, LayerKind.CSA, LayerKind.HCA, LayerKind.CSA)],
            "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 64},
            "partial_rotary_factor": 0.125,
            "rope_parameters": {
                "main": {"rope_type": "default", "rope_theta": 10000.0},
                "compress": {
                    "rope_type": "yarn",
                    "rope_theta": 160000.0,
                    "factor": 16,
                    "original_max_position_embeddings": 65536,
                    "attention_factor": 1.0,
                },
            },
        }
    )
    legacy = parse_model_config(
        {
            "num_hidden_layers": 4,
            "compress_ratios": [0, 4, 128, 4, 0],
            "compress_rate_hca": 64,
            "num_hash_layers": 1,
            "qk_rope_head_dim": 64,
            "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
        }
    )
    assert modern == legacy
    assert modern.mlps == (MlpKind.HASH, MlpKind.SCORED, MlpKind.SCORED, MlpKind.SCORED)


@pytest.mark.slow
@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128, 4]},
        {"num_hidden_layers": 1, "head_dim": 64, "qk_rope_head_dim": 16},
        {"num_hidden_layers": 5, "num_hash_layers": 9, "compress_rate_csa": 2},
        {
            "num_hidden_layers": 2,
            "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 512, "beta_fast": 16},
        },
        {"num_hidden_layers": 2, "rope_theta": 5e4, "compress_rope_theta": 7e5},
    ],
)
def test_defaults_and_legacy_keys_are_read_as_transformers_reads_them(raw: dict[str, Any], tmp_path: Path) -> None:
    from transformers import DeepseekV4Config

    theirs = DeepseekV4Config(**raw)
    ours = parse_model_config(raw)
    assert [kind.value for kind in ours.layers] == theirs.layer_types
    assert [kind.value for kind in ours.mlps] == theirs.mlp_layer_types
    assert ours.rope_dim == theirs.qk_rope_head_dim
    assert dict(zip(theirs.compress_rates, (ours.csa_rate, ours.hca_rate))) == theirs.compress_rates
    compress = theirs.rope_parameters["compress"]
    assert (ours.main_rope.theta, ours.compress_rope.theta) == (
        theirs.rope_parameters["main"]["rope_theta"],
        compress["rope_theta"],
    )
    assert (ours.compress_rope.yarn is not None) == (compress["rope_type"] == "yarn")
    if ours.compress_rope.yarn is not None:
        assert ours.compress_rope.yarn.factor == compress["factor"]
        assert ours.compress_rope.yarn.beta_fast == compress.get("beta_fast", 32)
    theirs.save_pretrained(tmp_path)
    again = load_model_config(tmp_path)
    assert again.layers == ours.layers
    assert again.compress_rope == ours.compress_rope


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"attention_bias": True}, "attention_bias"),
    ({"mlp_bias": True}, "mlp_bias"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"scoring_func": "sigmoid"}, "scoring_func"),
    ({"num_key_value_heads": 2}, "num_key_value_heads"),
    ({"n_shared_experts": 2}, "n_shared_experts"),
    ({"norm_topk_prob": False}, "norm_topk_prob"),
    ({"model_type": "deepseek_v32"}, "model_type"),
    ({"engram_tables": 3}, "engram_tables"),
    ({"hidden_size": "big"}, "hidden_size"),
    ({"hidden_size": True}, "hidden_size"),
    ({"head_dim": 0}, "head_dim"),
    ({"head_dim": 24, "partial_rotary_factor": 0.125}, "partial_rotary_factor"),
    ({"partial_rotary_factor": -1}, "partial_rotary_factor"),
    ({"index_head_dim": 15, "partial_rotary_factor": 0.015625}, "head_dim"),
    ({"index_head_dim": 32}, "index_head_dim"),
    ({"layer_types": ["full_attention"] * 43}, "layer_types"),
    ({"layer_types": ["sliding_attention"]}, "layer_types"),
    ({"mlp_layer_types": ["dense"] * 43}, "mlp_layer_types"),
    ({"compress_ratios": [0, 8]}, "compress_ratios"),
    ({"compress_ratios": [0, [4]]}, "compress_ratios"),
    ({"compress_rates": {"sliding_attention": 4}}, "compress_rates"),
    ({"compress_rates": 4}, "compress_rates"),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_parameters.rope_type"),
    ({"rope_scaling": {"type": "yarn", "factor": 2}}, "rope_parameters.original_max_position_embeddings"),
    (
        {"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 9, "attention_factor": 1.2}},
        "rope_parameters.attention_factor",
    ),
    ({"o_groups": 7}, "o_groups"),
    ({"num_experts_per_tok": 999}, "num_experts_per_tok"),
    ({"dtype": "float16"}, "dtype"),
    ({"expert_dtype": "fp4"}, "expert_dtype"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method"),
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 1]}}, "weight_block_size"),
    ({"eos_token_id": "</s>"}, "eos_token_id"),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
    ({"hc_eps": float("nan")}, "hc_eps"),
    ({"rope_parameters": {"main": 3, "compress": {}}}, "rope_parameters.main"),
    ({"rope_parameters": {"main": {"partial_rotary_factor": 0.25}, "compress": {}}}, "main.partial_rotary_factor"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary"),
    ({"rope_parameters": {"main": {}, "compress": {"long_factor": [1.0]}}}, "rope_parameters.compress.long_factor"),
    ({"rope_scaling": {"type": "yarn", "low_freq_factor": 2}}, "rope_parameters.low_freq_factor"),
]


@pytest.mark.parametrize(("raw", "field"), REFUSED, ids=[field for _, field in REFUSED])
def test_what_cannot_be_honoured_is_refused_by_name(raw: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedConfig) as caught:
        parse_model_config(raw)
    assert field in str(caught.value)
    assert caught.value.remedy


def test_nulls_and_irrelevant_fields_are_fine() -> None:
    config = parse_model_config(
        {"architectures": ["X"], "scoring_func": None, "eos_token_id": [1, 2], "bos_token_id": None, "use_cache": False}
    )
    assert config.eos_token_ids == (1, 2)
    assert config.bos_token_id is None


def test_a_file_that_is_no_config_is_refused(tmp_path: Path) -> None:
    for text in ("", "[]", "{"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UnsupportedConfig, match=r"config\.json"):
            load_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    assert len(load_model_config(tmp_path / "config.json").layers) == 2
