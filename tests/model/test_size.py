"""`sluice size` prints the published figures, and refuses by name."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sluice_cli.size import add_arguments, parse_size, run

FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "qk_rope_head_dim": 64,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "topk_method": "noaux_tc",
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "index_topk": 512,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "compress_ratios": [0, 0, *([4, 128] * 20), 4, 0],
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "num_hash_layers": 3,
    "swiglu_limit": 10.0,
    "expert_dtype": "fp4",
    "vocab_size": 129280,
    "max_position_embeddings": 1048576,
    "torch_dtype": "bfloat16",
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "num_nextn_predict_layers": 1,
    "sliding_window": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@pytest.fixture
def flash(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FLASH))
    return path


def size(*argv: object) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([str(a) for a in argv]))


@pytest.mark.parametrize(
    ("precision", "per_token"), [("bf16", "6,880.00"), ("fp8", "3,850.25"), ("fp8/fp4", "3,514.25")]
)
def test_flash_takes_the_published_bytes_per_token(
    flash: Path, capsys: pytest.CaptureFixture[str], precision: str, per_token: str
) -> None:
    assert size("--config", flash, "--precision", precision, "--memory", "80GiB") == 0
    out = capsys.readouterr().out
    assert f" {per_token} " in out
    assert "284,334,567,511 parameters" in out
    assert "sequences of 1,048,576 tokens:" in out


def test_a_sequence_is_pages_state_and_snapshot(flash: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert size("--config", flash.parent, "--context", 1000, "--page-tokens", 128, "--memory", "1 GiB") == 0
    out = capsys.readouterr().out
    assert "a sequence of 1,000 tokens: 8 pages" in out
    assert "in 1,073,741,824  1.00 GiB:" in out
    assert "the model's own limit is 1,048,576 tokens" in out


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--precision", "int8"], "--precision"),
        (["--page-tokens", "100"], "multiple of 128"),
        (["--page-tokens", "0"], "page_tokens is 0"),
        (["--memory", "much"], "--memory is 'much'"),
        (["--context", "0"], "--context is 0"),
        (["--context", "9999999"], "max_position_embeddings"),
    ],
)
def test_options_that_make_no_sense_are_named(
    flash: Path, capsys: pytest.CaptureFixture[str], argv: list[str], named: str
) -> None:
    assert size("--config", flash, *argv) == 2
    assert named in capsys.readouterr().err


def test_a_config_that_cannot_be_served_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    assert size("--config", path) == 2
    assert "cannot be read" in capsys.readouterr().err
    path.write_text(json.dumps({**FLASH, "attention_bias": True}))
    assert size("--config", path) == 2
    assert "attention_bias" in capsys.readouterr().err


def test_sizes_parse_in_both_systems() -> None:
    assert [parse_size(s) for s in ("80GiB", "1kB", "2 MB", "1.5KiB", "7")] == [80 << 30, 1000, 2_000_000, 1536, 7]


def test_size_needs_no_torch() -> None:
    code = "import sys, sluice_cli.size; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
