"""Tensor names of the published files, of `save_pretrained`, and of transformers' modules, as the last of these.

Source of the table: `../shared/facts/deepseek.md` 2.12.
"""

from __future__ import annotations

import re

_RULES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^(embed|layers|norm|hc_head_)", r"model.\1"),
        (r"^head\.weight$", "lm_head.weight"),
        (r"^model\.embed\.weight$", "model.embed_tokens.weight"),
        (r"^model\.hc_head_(fn|base|scale)$", r"model.hc_head.hc_\1"),
        (r"\.attn\.", ".self_attn."),
        (r"\.ffn\.", ".mlp."),
        (r"\.self_attn\.indexer\.compressor\.", ".self_attn.compressor.indexer."),
        (r"\.self_attn\.indexer\.weights_proj\.", ".self_attn.compressor.indexer.scorer.weights_proj."),
        (r"\.self_attn\.indexer\.wq_b\.", ".self_attn.compressor.indexer.q_b_proj."),
        (r"\.attn_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
        (r"\.attn_sink$", ".sinks"),
        (r"\.ape$", ".position_bias"),
        (r"\.wq_a\.", ".q_a_proj."),
        (r"\.wq_b\.", ".q_b_proj."),
        (r"\.wkv\.", ".kv_proj."),
        (r"\.wgate\.", ".gate_proj."),
        (r"\.wo_a\.", ".o_a_proj."),
        (r"\.wo_b\.", ".o_b_proj."),
        (r"\.q_norm\.", ".q_a_norm."),
        (r"(\.self_attn\..*|\.self_attn)\.norm\.", r"\1.kv_norm."),
        (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
        (r"\.shared_experts\.w1\.", ".shared_experts.gate_proj."),
        (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."),
        (r"\.shared_experts\.w3\.", ".shared_experts.up_proj."),
        (r"\.(scale|weight_scale_inv)$", ".weight_scale_inv"),
    )
)
_HYPER_SCALE = re.compile(r"_hc\.scale$|hc_scale$|hc_(attn|ffn|head)_scale$")


def canonical(name: str) -> str | None:
    """The module's name; per-expert tensors keep `experts.E.w1.weight`. None for multi-token prediction weights."""
    if name.startswith(("mtp.", "model.mtp.")):
        return None
    rules = _RULES[:-1] if _HYPER_SCALE.search(name) else _RULES
    for pattern, replacement in rules:
        name = pattern.sub(replacement, name)
    return name
