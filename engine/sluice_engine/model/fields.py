"""Reading of single config fields, and the lists of which fields mean what to us."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from sluice_engine.model.errors import UnsupportedConfig

Kind = TypeVar("Kind", bound=StrEnum)

# Only these values are implemented. Absent or null is the same as the value here.
FIXED: dict[str, tuple[Any, str]] = {
    "model_type": ("deepseek_v4", "serve a DeepSeek-V4 checkpoint"),
    "num_key_value_heads": (1, "DeepSeek-V4 shares one key-value head"),
    "attention_bias": (False, "attention biases are not implemented"),
    "mlp_bias": (False, "MLP biases are not implemented"),
    "tie_word_embeddings": (False, "save the checkpoint with a head of its own"),
    "hidden_act": ("silu", "only silu is implemented"),
    "scoring_func": ("sqrtsoftplus", "only sqrtsoftplus is implemented"),
    "norm_topk_prob": (True, "expert weights are always normalised"),
    "n_shared_experts": (1, "exactly one shared expert is implemented"),
    "topk_method": ("noaux_tc", "only noaux_tc is implemented"),
    "n_group": (1, "grouped routing is not implemented"),
    "topk_group": (1, "grouped routing is not implemented"),
    "use_attn_sink": (True, "attention without sinks is not implemented"),
    "output_router_logits": (False, "router logits are not reported"),
}
READ = frozenset(
    """vocab_size hidden_size num_hidden_layers num_attention_heads head_dim partial_rotary_factor qk_rope_head_dim
    q_lora_rank o_groups o_lora_rank sliding_window layer_types compress_rates compress_ratios compress_rate_csa
    compress_rate_hca mlp_layer_types num_hash_layers index_n_heads index_head_dim index_topk n_routed_experts
    num_local_experts num_experts_per_tok moe_intermediate_size routed_scaling_factor swiglu_limit hc_mult
    hc_sinkhorn_iters hc_eps rms_norm_eps rope_theta compress_rope_theta rope_parameters rope_scaling
    max_position_embeddings bos_token_id eos_token_id dtype torch_dtype quantization_config expert_dtype""".split()  # noqa: SIM905
)
# Training, bookkeeping of libraries, and multi-token prediction (its weights are left out when loading).
IGNORED = frozenset(
    """architectures auto_map transformers_version initializer_range use_cache pad_token_id attention_dropout
    router_aux_loss_coef router_jitter_noise num_nextn_predict_layers intermediate_size aux_loss_alpha seq_aux ep_size
    pretraining_tp _name_or_path id2label label2id problem_type return_dict output_attentions output_hidden_states
    chunk_size_feed_forward is_encoder_decoder unsloth_version""".split()  # noqa: SIM905
)

# Of rope_parameters, and of its parts `main` and `compress`. DeepSeek-V4 multiplies by no mscale.
ROPE = frozenset(
    """rope_type type rope_theta factor original_max_position_embeddings beta_fast beta_slow attention_factor truncate
    partial_rotary_factor mscale mscale_all_dim""".split()  # noqa: SIM905
)


def check_fields(raw: Mapping[str, Any]) -> None:
    """Every field is read, has the one value that we implement, or is documented as irrelevant to serving."""
    for name, (only, remedy) in FIXED.items():
        value = raw.get(name)
        if value is not None and value != only:
            raise UnsupportedConfig(name, f"is {value!r}, only {only!r} is supported", remedy)
    for name in raw:
        if name not in FIXED and name not in READ and name not in IGNORED:
            raise UnsupportedConfig(name, "is unknown here, so it cannot be honoured", "remove it or ask for support")


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed access to `raw`; what does not fit raises UnsupportedConfig with the field's name."""

    raw: Mapping[str, Any]
    within: str = ""

    def size(self, name: str, default: int, alias: str = "", *, zero: bool = False) -> int:
        value = self.raw.get(name)
        if value is None and alias:
            value = self.raw.get(alias)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < (0 if zero else 1):
            raise self._bad(name, value, "give a positive integer")
        return value

    def optional_size(self, name: str, default: int) -> int | None:
        return None if name in self.raw and self.raw[name] is None else self.size(name, default, zero=True)

    def number(self, name: str, default: float) -> float:
        value = self.raw.get(name)
        if value is None:
            value = default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self._bad(name, value, "give a positive, finite number")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return None if self.raw.get(name) is None else self.number(name, 0.0)

    def token_ids(self, name: str, default: int) -> tuple[int, ...]:
        value = self.raw.get(name, default)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
            raise self._bad(name, value, "give token ids")
        return tuple(ids)

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.raw.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self._bad(name, value, "give an object")
        return value

    def names(self, name: str) -> list[Any] | None:
        value = self.raw.get(name)
        if value is not None and not isinstance(value, list):
            raise self._bad(name, value, "give a list")
        return value

    def choice(self, name: str, value: Any, kinds: type[Kind]) -> Kind:
        try:
            return kinds(value)
        except ValueError:
            raise self._bad(name, value, f"entries are {[k.value for k in kinds]}") from None

    def must(self, name: str, only: object, remedy: str) -> None:
        value = self.raw.get(name, only)
        if value != only:
            raise self._bad(name, value, remedy)

    def _bad(self, name: str, value: object, remedy: str) -> UnsupportedConfig:
        return UnsupportedConfig(self.within + name, f"is {value!r}", remedy)
