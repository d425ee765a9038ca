"""Checkpoints under all three naming schemes, sharded or not, quantised or not; defects are named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sluice_engine.model.config import load_model_config
from sluice_engine.model.dequantise import from_blocks, from_fp4
from sluice_engine.model.errors import BadWeights
from sluice_engine.model.forward import Model
from sluice_engine.model.weights import load_weights

# Official names, written out by hand from facts/deepseek.md 2.12 (ours are derived by rules).
OFFICIAL = {
    "model.embed_tokens.weight": "embed.weight",
    "lm_head.weight": "head.weight",
    "model.norm.weight": "norm.weight",
    "model.hc_head.hc_fn": "hc_head_fn",
    "model.hc_head.hc_base": "hc_head_base",
    "model.hc_head.hc_scale": "hc_head_scale",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_a_proj.weight": "attn.wq_a.weight",
    "self_attn.q_a_norm.weight": "attn.q_norm.weight",
    "self_attn.q_b_proj.weight": "attn.wq_b.weight",
    "self_attn.kv_proj.weight": "attn.wkv.weight",
    "self_attn.kv_norm.weight": "attn.kv_norm.weight",
    "self_attn.o_a_proj.weight": "attn.wo_a.weight",
    "self_attn.o_b_proj.weight": "attn.wo_b.weight",
    "self_attn.sinks": "attn.attn_sink",
    "self_attn.compressor.kv_proj.weight": "attn.compressor.wkv.weight",
    "self_attn.compressor.gate_proj.weight": "attn.compressor.wgate.weight",
    "self_attn.compressor.position_bias": "attn.compressor.ape",
    "self_attn.compressor.kv_norm.weight": "attn.compressor.norm.weight",
    "self_attn.compressor.indexer.q_b_proj.weight": "attn.indexer.wq_b.weight",
    "self_attn.compressor.indexer.scorer.weights_proj.weight": "attn.indexer.weights_proj.weight",
    "self_attn.compressor.indexer.kv_proj.weight": "attn.indexer.compressor.wkv.weight",
    "self_attn.compressor.indexer.gate_proj.weight": "attn.indexer.compressor.wgate.weight",
    "self_attn.compressor.indexer.position_bias": "attn.indexer.compressor.ape",
    "self_attn.compressor.indexer.kv_norm.weight": "attn.indexer.compressor.norm.weight",
    "mlp.gate.weight": "ffn.gate.weight",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "mlp.gate.tid2eid": "ffn.gate.tid2eid",
    "mlp.shared_experts.gate_proj.weight": "ffn.shared_experts.w1.weight",
    "mlp.shared_experts.down_proj.weight": "ffn.shared_experts.w2.weight",
    "mlp.shared_experts.up_proj.weight": "ffn.shared_experts.w3.weight",
} | {f"{hc}_hc.{leaf}": f"hc_{hc}_{leaf}" for hc in ("attn", "ffn") for leaf in ("fn", "base", "scale")}


def official(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    result = {}
    for name, tensor in state.items():
        found = re.match(r"model\.layers\.(\d+)\.(.*)", name)
        if found is None:
            result[OFFICIAL[name]] = tensor
            continue
        layer, leaf = f"layers.{found[1]}.", found[2]
        if leaf == "mlp.experts.gate_up_proj":
            for e, expert in enumerate(tensor):
                half = len(expert) // 2
                result[f"{layer}ffn.experts.{e}.w1.weight"] = expert[:half].contiguous()
                result[f"{layer}ffn.experts.{e}.w3.weight"] = expert[half:].contiguous()
        elif leaf == "mlp.experts.down_proj":
            result |= {f"{layer}ffn.experts.{e}.w2.weight": expert.contiguous() for e, expert in enumerate(tensor)}
        else:
            result[layer + OFFICIAL[leaf]] = tensor
    return result


def module_state(checkpoint: Any) -> dict[str, torch.Tensor]:
    return load_file(checkpoint.directory / "model.safetensors")


def write(directory: Path, checkpoint: Any, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    raw = json.loads((checkpoint.directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**raw, **config}))
    save_file(tensors, directory / "model.safetensors")
    return directory


def logits(checkpoint: Any, directory: Path) -> torch.Tensor:
    config = load_model_config(directory)
    world = checkpoint.world()
    world.model = Model(config, load_weights(directory, config), world.views)
    return world.feed((world.sequence(), list(range(40))))


def reference(checkpoint: Any) -> torch.Tensor:
    world = checkpoint.world()
    return world.feed((world.sequence(), list(range(40))))


def test_official_names_load_the_same_bits(tiny: Any, tmp_path: Path) -> None:
    mtp = {"mtp.0.e_proj.weight": torch.zeros(3, 3), "mtp.0.attn.wq_a.weight": torch.zeros(2)}
    published = write(tmp_path, tiny, official(module_state(tiny)) | mtp)
    assert torch.equal(logits(tiny, published), reference(tiny))


@pytest.mark.slow
def test_what_save_pretrained_writes_loads_the_same_bits(tiny: Any, tmp_path: Path) -> None:
    fresh = type(tiny.oracle)(tiny.oracle.config)  # what was loaded from module names is saved under them
    fresh.load_state_dict(tiny.oracle.state_dict())
    fresh.save_pretrained(tmp_path, max_shard_size="200KB")
    names = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert any(".attn.norm.weight" in n for n in names), "this is meant to be the hybrid scheme"
    assert torch.equal(logits(tiny, tmp_path), reference(tiny))


def test_sharded_checkpoints_load_and_report_progress(tiny: Any, tmp_path: Path) -> None:
    state = module_state(tiny)
    (tmp_path / "config.json").write_bytes((tiny.directory / "config.json").read_bytes())
    place = {name: f"model-0000{n % 4}-of-00004.safetensors" for n, name in enumerate(state)}
    for file in set(place.values()):
        save_file({name: state[name] for name in state if place[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    (tmp_path / "consolidated.safetensors").write_bytes(b"not in the index, so not read")
    seen: list[tuple[int, int]] = []
    config = load_model_config(tmp_path)
    load_weights(tmp_path, config, lambda loaded, total: seen.append((loaded, total)))
    assert seen == sorted(seen)
    total = sum(f.stat().st_size for f in tmp_path.glob("model-*.safetensors"))
    assert {t for _, t in seen} == {total}
    assert 0.9 * total < seen[-1][0] <= total
    assert torch.equal(logits(tiny, tmp_path), reference(tiny))
    next(tmp_path.glob("model-00002*")).unlink()
    with pytest.raises(BadWeights, match="model-00002"):
        load_weights(tmp_path, config)


def quantise_fp8(weight: torch.Tensor, block: int, ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = -(-weight.shape[0] // block), -(-weight.shape[1] // block)
    scale = torch.empty(rows, columns)
    out = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            part = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            s = weight[part].abs().max() / 448
            scale[i, j] = 2.0 ** torch.ceil(torch.log2(s)) if ue8m0 else s
            out[part] = (weight[part] / scale[i, j]).to(torch.float8_e4m3fn)
    return out, scale.to(torch.float8_e8m0fnu) if ue8m0 else scale


def quantise_fp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    blocks = weight.unflatten(1, (-1, 32))
    scale = 2.0 ** torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True) / 6))
    codes = ((blocks / scale)[..., None] - values).abs().argmin(-1).flatten(1)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
    return packed, scale.squeeze(-1).to(torch.float8_e8m0fnu)


FP8 = re.compile(r"attn\.(wq_a|wq_b|wkv|wo_a|wo_b)\.|indexer\.wq_b\.|shared_experts\.")


@pytest.mark.parametrize(("ue8m0", "suffix"), [(True, "scale"), (False, "weight_scale_inv")])
def test_quantised_checkpoints_are_dequantised_on_load(tiny: Any, tmp_path: Path, ue8m0: bool, suffix: str) -> None:
    state, plain = official(module_state(tiny)), {}
    for name, tensor in list(state.items()):
        if FP8.search(name):
            state[name], scale = quantise_fp8(tensor, 16, ue8m0)
        elif ".experts." in name:
            state[name], scale = quantise_fp4(tensor)
        else:
            continue
        state[name.removesuffix("weight") + suffix] = scale
        plain[name] = dequantised_by_hand(state[name], scale)
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16], "expert_dtype": "fp4"}
    for directory in (tmp_path / "quantised", tmp_path / "plain"):
        directory.mkdir()
    write(tmp_path / "quantised", tiny, state, quantization_config=quantization)
    write(tmp_path / "plain", tiny, official(module_state(tiny)) | plain)
    found = logits(tiny, tmp_path / "quantised")
    assert torch.equal(found, logits(tiny, tmp_path / "plain"))
    assert not torch.equal(found, reference(tiny))


def dequantised_by_hand(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    s = scale.float()
    if weight.dtype is torch.float8_e4m3fn:
        rows, columns = torch.meshgrid(*[torch.arange(n) for n in weight.shape], indexing="ij")
        return weight.float() * s[rows // 16, columns // 16]
    lut = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    table = torch.tensor([*lut, *(-v for v in lut)])
    bits = weight.view(torch.uint8).int()
    out = torch.empty(weight.shape[0], weight.shape[1] * 2)
    out[:, 0::2], out[:, 1::2] = table[bits % 16], table[bits // 16]
    return out * s.repeat_interleave(32, 1)


def test_a_table_of_small_integers_is_a_table(tiny: Any, tmp_path: Path) -> None:
    tensors = official(module_state(tiny))
    tables = [name for name in tensors if name.endswith("tid2eid")]
    assert tables
    for name in tables:
        tensors[name] = tensors[name].to(torch.int32)
    write(tmp_path, tiny, tensors)
    assert torch.equal(logits(tiny, tmp_path), reference(tiny))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint16, torch.bool])
def test_scales_of_another_kind_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(BadWeights, match="scale of w: is torch"):
        from_blocks("w", torch.zeros(4, 4).to(torch.float8_e4m3fn), torch.ones(1, 1).to(dtype), (16, 16))


def test_block_edges_may_be_short() -> None:
    weight = torch.randn(37, 21, generator=torch.Generator().manual_seed(0))
    packed, scale = quantise_fp8(weight, 16, ue8m0=False)
    back = from_blocks("w", packed, scale, (16, 16))
    assert (back - weight).abs().max() < 0.07 * weight.abs().max()
    with pytest.raises(BadWeights, match="scale of w"):
        from_blocks("w", packed, scale[:2], (16, 16))
    with pytest.raises(BadWeights, match="scale of w"):
        from_fp4("w", torch.zeros(4, 16, dtype=torch.int8), torch.ones(4, 3))


def gone(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def put(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
    return lambda tensors: tensors.update({name: torch.zeros(shape).to(dtype)})


def at(name: str, place: tuple[int, ...], value: int) -> Any:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].clone()
        tensors[name][place] = value

    return spoil


DEFECTS = [
    (gone("layers.2.attn.wkv.weight"), r"model\.layers\.2\.self_attn\.kv_proj\.weight of shape \[32, 64\] is missing"),
    (gone("layers.3.ffn.experts.7.w3.weight"), r"experts\.7\.w3\.weight is missing"),
    (put("layers.9.attn.wkv.weight", 2, 5), r"layers\.9\.attn\.wkv\.weight of shape \[2, 5\] is extra"),
    (put("stranger", 2), r"stranger of shape \[2\] is extra"),
    (put("embed.weight", 7, 64), r"embed_tokens\.weight: has shape \[7, 64\].*\[320, 64\]"),
    (put("layers.0.ffn.experts.1.w2.weight", 64, 31), r"experts\.1\.w2\.weight: has shape \[64, 31\].*\[64, 32\]"),
    (put("model.layers.0.attn_norm.weight", 64), "is there twice"),
    (put("head.weight", 320, 64, dtype=torch.float8_e4m3fn), "has no scale"),
    (put("head.weight", 320, 64, dtype=torch.int8), "has no scale"),
    (put("head.weight", 320, 64, dtype=torch.uint16), r"lm_head\.weight: is U16; weights are"),
    (put("head.weight", 320, 64, dtype=torch.int64), r"lm_head\.weight: is I64"),
    (put("norm.weight", 64, dtype=torch.bool), r"norm\.weight: is BOOL"),
    (
        put("layers.0.ffn.experts.1.w2.weight", 64, 32, dtype=torch.complex64),
        r"experts\.1\.w2\.weight: is C64",
    ),
    (put("layers.1.ffn.gate.tid2eid", 320, 2), r"gate\.tid2eid: is F32; ids are integers"),
    (put("layers.1.ffn.gate.tid2eid", 320, 3, dtype=torch.int64), r"gate\.tid2eid: has shape \[320, 3\]"),
    (at("layers.1.ffn.gate.tid2eid", (7, 1), 8), r"gate\.tid2eid: entry \[7, 1\] is 8; ids are 0 to 7"),
    (at("layers.0.ffn.gate.tid2eid", (319, 0), -1), r"gate\.tid2eid: entry \[319, 0\] is -1"),
]


@pytest.mark.parametrize(("spoil", "message"), DEFECTS, ids=[m for _, m in DEFECTS])
def test_defects_name_the_tensor_and_both_shapes(tiny: Any, tmp_path: Path, spoil: Any, message: str) -> None:
    tensors = official(module_state(tiny))
    spoil(tensors)
    directory = write(tmp_path, tiny, tensors)
    read: list[int] = []
    with pytest.raises(BadWeights, match=message):
        load_weights(directory, load_model_config(directory), lambda loaded, total: read.append(loaded))
    assert not read or "entry" in message  # headers told it, before gigabytes were read


def test_directories_without_weights_are_refused(tiny: Any, tmp_path: Path) -> None:
    with pytest.raises(BadWeights, match="no safetensors"):
        load_weights(tmp_path, tiny.config)
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(BadWeights, match="no readable safetensors"):
        load_weights(tmp_path, tiny.config)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": 5}}')
    with pytest.raises(BadWeights, match="no index"):
        load_weights(tmp_path, tiny.config)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(BadWeights, match="no index"):
        load_weights(tmp_path, tiny.config)
