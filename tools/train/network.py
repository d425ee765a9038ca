"""DeepSeek-V4 for training: whole sequences at once, differentiable indexer scores, no host synchronisation.

`transformers` provides the parameters, their names and their initial values; `forward` is a batched rewrite of its
`DeepseekV4ForCausalLM` that agrees with it to fp32 rounding (`tests/train`) and can be captured in a CUDA graph.
Shapes: B sequences of S tokens (S a multiple of every compress rate and of the window), D hidden, H heads of width C,
T compressed entries, N residual streams.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

if TYPE_CHECKING:  # its import costs seconds, which only who makes a model pays
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

CSA, HCA, SLIDING = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
LAYERS = (SLIDING, CSA, HCA, CSA)


def configuration(vocab_size: int) -> DeepseekV4Config:
    """About one million parameters; a page of 16 tokens is a multiple of both compress rates."""
    return transformers.DeepseekV4Config(
        vocab_size=vocab_size, hidden_size=128, num_hidden_layers=len(LAYERS), layer_types=list(LAYERS),
        num_attention_heads=4, num_key_value_heads=1, head_dim=64, partial_rotary_factor=0.25, q_lora_rank=64,
        o_groups=4, o_lora_rank=32, sliding_window=8, compress_rates={CSA: 4, HCA: 16},
        index_n_heads=16, index_head_dim=32, index_topk=8,
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"], n_routed_experts=4, num_experts_per_tok=2,
        n_shared_experts=1, moe_intermediate_size=64, scoring_func="sqrtsoftplus", routed_scaling_factor=1.5,
        hc_mult=2, hc_sinkhorn_iters=3, hc_eps=1e-6, max_position_embeddings=1024, rope_theta=10000.0,
        compress_rope_theta=40000.0, num_nextn_predict_layers=0, initializer_range=0.08,
        rope_parameters={"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 256,
                         "beta_fast": 32, "beta_slow": 1},
        bos_token_id=0, eos_token_id=1, pad_token_id=2, dtype="float32",
    )  # fmt: skip


def initialise(config: DeepseekV4Config, seed: int) -> DeepseekV4ForCausalLM:
    """Random weights; the hash table sends every token to distinct experts (transformers leaves it at zero)."""
    torch.manual_seed(seed)
    model = transformers.DeepseekV4ForCausalLM(config)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            for row in buffer:
                row.copy_(torch.randperm(config.n_routed_experts)[: len(row)])
    return model


@dataclass
class Signals:
    """What `forward` leaves for the training loss and the load balancer, one item per CSA (or routed) layer.

    scores: [B, S, T] indexer scores, -inf where the entry lies in the future.
    attention: [B, S, T] attention mass on each entry without selection, summed over heads; carries no gradient.
    load: (bias buffer, [E] share of tokens each expert got).
    """

    scores: list[Tensor] = field(default_factory=list)
    attention: list[Tensor] = field(default_factory=list)
    load: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class Switches:
    """0-dim tensors, which a captured graph follows: `dense` ignores top-k, `coarse` rounds index keys to fp4."""

    dense: Tensor
    coarse: Tensor


def rms(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate adjacent pairs of the trailing 2*cos.shape[-1] channels; cos and sin broadcast against x's pairs."""
    keep = x.shape[-1] - 2 * cos.shape[-1]
    head, tail = x[..., :keep], x[..., keep:]
    even, odd = tail[..., 0::2], tail[..., 1::2]
    return torch.cat([head, torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)], -1)


def round_fp4(x: Tensor) -> Tensor:
    """Nearest e2m1 value under one power-of-two scale per row; the gradient passes straight through."""
    scale = torch.exp2(torch.ceil(torch.log2(x.detach().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 6)))
    size = (x.detach() / scale).abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    value = torch.sign(x.detach()) * (torch.round(size / step) * step).clamp(max=6) * scale
    return x + (value - x.detach())


class Network:
    """The forward pass over `model`'s parameters and buffers, which it reads by name and shares with it."""

    def __init__(self, model: DeepseekV4ForCausalLM) -> None:
        self.config = model.config
        self.weights: Mapping[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def forward(self, ids: Tensor, switches: Switches, signals: Signals) -> Tensor:
        """Logits [B, S, V] of ids [B, S]; right padding is harmless because everything is causal."""
        c, w = self.config, self.weights
        x = w["model.embed_tokens.weight"][ids].unsqueeze(2).expand(-1, -1, c.hc_mult, -1)
        for layer in range(c.num_hidden_layers):
            p = f"model.layers.{layer}."
            h, post, comb = self._collapse(p + "attn_hc.", x)
            h = rms(h, c.rms_norm_eps, w[p + "input_layernorm.weight"])
            x = self._expand(x, self._attention(layer, h, switches, signals), post, comb)
            h, post, comb = self._collapse(p + "ffn_hc.", x)
            h = rms(h, c.rms_norm_eps, w[p + "post_attention_layernorm.weight"])
            x = self._expand(x, self._experts(layer, h, ids, signals), post, comb)
        z = F.linear(rms(x.flatten(2), c.rms_norm_eps), w["model.hc_head.hc_fn"])
        pre = torch.sigmoid(z * w["model.hc_head.hc_scale"] + w["model.hc_head.hc_base"]) + c.hc_eps
        h = rms((pre.unsqueeze(-1) * x).sum(2), c.rms_norm_eps, w["model.norm.weight"])
        return F.linear(h, w["lm_head.weight"])

    def _collapse(self, p: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Streams [B,S,N,D] to one input [B,S,D], with the write weights [B,S,N] and the mixing matrix [B,S,N,N]."""
        c, w, n = self.config, self.weights, self.config.hc_mult
        z = F.linear(rms(x.flatten(2), c.rms_norm_eps), w[p + "fn"])
        base, scale = w[p + "base"], w[p + "scale"]
        pre = torch.sigmoid(z[..., :n] * scale[0] + base[:n]) + c.hc_eps
        post = 2 * torch.sigmoid(z[..., n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = torch.softmax((z[..., 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n)), -1) + c.hc_eps
        comb = comb / (comb.sum(-2, keepdim=True) + c.hc_eps)
        for _ in range(c.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + c.hc_eps)
            comb = comb / (comb.sum(-2, keepdim=True) + c.hc_eps)
        return (pre.unsqueeze(-1) * x).sum(2), post, comb

    @staticmethod
    def _expand(x: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        mixed = (comb.unsqueeze(-1) * x.unsqueeze(3)).sum(2)  # stream k gets sum_j comb[j, k] * x_j
        return post.unsqueeze(-1) * y.unsqueeze(2) + mixed

    def _angles(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        label = "main" if self.config.layer_types[layer] == SLIDING else "compress"
        angle = positions[:, None].float() * self.weights[f"model.rotary_emb.{label}_inv_freq"]
        return angle.cos(), angle.sin()

    def _attention(self, layer: int, x: Tensor, switches: Switches, signals: Signals) -> Tensor:
        c, w, p = self.config, self.weights, f"model.layers.{layer}.self_attn."
        b, s, _ = x.shape
        cos, sin = self._angles(layer, torch.arange(s, device=x.device))
        qr = rms(F.linear(x, w[p + "q_a_proj.weight"]), c.rms_norm_eps, w[p + "q_a_norm.weight"])
        q = F.linear(qr, w[p + "q_b_proj.weight"]).unflatten(-1, (c.num_attention_heads, c.head_dim))
        q = rotate(rms(q, c.rms_norm_eps), cos[:, None], sin[:, None]) * c.head_dim**-0.5
        kv = rms(F.linear(x, w[p + "kv_proj.weight"]), c.rms_norm_eps, w[p + "kv_norm.weight"])
        kv = rotate(kv, cos, sin)
        logits, near = self._window(q, kv)
        parts = [logits, w[p + "sinks"].view(1, -1, 1, 1).expand(b, -1, s, 1)]
        entries = None
        if c.layer_types[layer] != SLIDING:
            entries = self._compress(layer, p + "compressor.", x, c.head_dim)
            hidden = self._future(s, entries.shape[1], c.compress_rates[c.layer_types[layer]], x.device)
            far = torch.einsum("bshc,btc->bhst", q, entries).masked_fill(hidden, -torch.inf)
            if c.layer_types[layer] == CSA:
                scores = self._index(layer, x.detach(), qr.detach(), switches).masked_fill(hidden, -torch.inf)
                with torch.no_grad():
                    full = torch.cat([*parts, far], -1).softmax(-1)[..., -far.shape[-1] :].sum(1)
                    least = scores.topk(min(c.index_topk, scores.shape[-1]), -1).values[..., -1:]
                    dropped = (scores < least) & ~switches.dense
                far = far.masked_fill(dropped.unsqueeze(1), -torch.inf)
                signals.scores.append(scores)
                signals.attention.append(full)
            parts.append(far)
        weights = torch.cat(parts, -1).softmax(-1)
        out = self._window_sum(weights[..., : near.shape[2]], near)
        if entries is not None:
            out = out + torch.einsum("bhst,btc->bshc", weights[..., near.shape[2] + 1 :], entries)
        out = rotate(out, cos[:, None], -sin[:, None]).reshape(b, s, c.o_groups, -1)
        out = torch.einsum("bsgc,grc->bsgr", out, w[p + "o_a_proj.weight"].unflatten(0, (c.o_groups, -1)))
        return F.linear(out.flatten(2), w[p + "o_b_proj.weight"])

    def _window(self, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B,H,S,2W] against keys [B,S/W,2W,C]: a block of W queries sees its own and the previous W."""
        size = self.config.sliding_window
        blocks = kv.unflatten(1, (-1, size))
        near = torch.cat([F.pad(blocks[:, :-1], (0, 0, 0, 0, 1, 0)), blocks], 2)
        logits = torch.einsum("bnqhc,bnkc->bhnqk", q.unflatten(1, (-1, size)), near)
        row, column = torch.arange(size, device=q.device)[:, None], torch.arange(2 * size, device=q.device)[None]
        visible = (column > row) & (column <= row + size)
        first = torch.arange(blocks.shape[1], device=q.device)[:, None, None] == 0
        logits = logits.masked_fill(~visible | (first & (column < size)), -torch.inf)
        return logits.flatten(2, 3), near

    def _window_sum(self, weights: Tensor, near: Tensor) -> Tensor:
        blocks = weights.unflatten(2, (-1, self.config.sliding_window))
        return torch.einsum("bhnqk,bnkc->bnqhc", blocks, near).flatten(1, 2)

    @staticmethod
    def _future(s: int, t: int, rate: int, device: torch.device) -> Tensor:
        """[S, T] true where an entry is not complete at a query's position."""
        return torch.arange(t, device=device)[None] >= (torch.arange(s, device=device)[:, None] + 1) // rate

    def _compress(self, layer: int, p: str, x: Tensor, width: int) -> Tensor:
        """Entries [B, T, width]: gated pools of one window (HCA), or of a window and its predecessor (CSA)."""
        c, w = self.config, self.weights
        rate = c.compress_rates[c.layer_types[layer]]
        kv = F.linear(x, w[p + "kv_proj.weight"]).unflatten(1, (-1, rate))
        gate = F.linear(x, w[p + "gate_proj.weight"]).unflatten(1, (-1, rate)) + w[p + "position_bias"]
        if c.layer_types[layer] == CSA:
            before = F.pad(kv[:, :-1, :, :width], (0, 0, 0, 0, 1, 0))
            closed = F.pad(gate[:, :-1, :, :width], (0, 0, 0, 0, 1, 0), value=-torch.inf)
            kv, gate = torch.cat([before, kv[..., width:]], 2), torch.cat([closed, gate[..., width:]], 2)
        entries = rms((gate.softmax(2) * kv).sum(2), c.rms_norm_eps, w[p + "kv_norm.weight"])
        return rotate(entries, *self._angles(layer, torch.arange(entries.shape[1], device=x.device) * rate))

    def _index(self, layer: int, x: Tensor, qr: Tensor, switches: Switches) -> Tensor:
        c, w, p = self.config, self.weights, f"model.layers.{layer}.self_attn.compressor.indexer."
        keys = self._compress(layer, p, x, c.index_head_dim)
        keys = torch.where(switches.coarse, round_fp4(keys), keys)
        q = F.linear(qr, w[p + "q_b_proj.weight"]).unflatten(-1, (c.index_n_heads, c.index_head_dim))
        cos, sin = self._angles(layer, torch.arange(x.shape[1], device=x.device))
        q = rotate(q, cos[:, None], sin[:, None])
        share = F.linear(x, w[p + "scorer.weights_proj.weight"]) * (c.index_n_heads * c.index_head_dim) ** -0.5
        return torch.einsum("bshc,btc->bsht", q, keys).relu().mul(share.unsqueeze(-1)).sum(2)

    def _experts(self, layer: int, x: Tensor, ids: Tensor, signals: Signals) -> Tensor:
        """Every expert runs on every token and the router's zeros remove what it did not choose."""
        c, w, p = self.config, self.weights, f"model.layers.{layer}.mlp."
        scores = F.softplus(F.linear(x, w[p + "gate.weight"])).sqrt()
        if c.mlp_layer_types[layer] == "hash_moe":
            chosen = w[p + "gate.tid2eid"][ids]
        else:
            bias = w[p + "gate.e_score_correction_bias"]
            chosen = (scores.detach() + bias).topk(c.num_experts_per_tok, -1).indices
            every = torch.arange(c.n_routed_experts, device=x.device)
            signals.load.append((bias, (chosen.unsqueeze(-1) == every).float().mean((0, 1, 2))))
        picked = scores.gather(-1, chosen)
        picked = picked / (picked.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor
        share = torch.zeros_like(scores).scatter(-1, chosen, picked)
        up = torch.einsum("bsd,efd->bsef", x, w[p + "experts.gate_up_proj"])
        inner = self._glu(*up.chunk(2, -1)) * share.unsqueeze(-1)
        routed = torch.einsum("bsef,edf->bsd", inner, w[p + "experts.down_proj"])
        q = p + "shared_experts."
        own = self._glu(F.linear(x, w[q + "gate_proj.weight"]), F.linear(x, w[q + "up_proj.weight"]))
        return routed + F.linear(own, w[q + "down_proj.weight"])

    def _glu(self, gate: Tensor, up: Tensor) -> Tensor:
        limit = self.config.swiglu_limit
        return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
