"""DeepSeek-V4 over paged records, batched over rows of any lengths, decode rows and chunks mixed.

Activations are fp32; products run in the weights' dtype. Every product has a fixed shape, padded and in blocks, and
every row reduces in the order of its own slots: bits depend neither on the rest of a batch nor on how a prompt was cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sluice_engine.model.config import ModelConfig
from sluice_engine.model.page_table import BatchRecords
from sluice_engine.model.plan import BatchPlan, QueryBlock, Run, plan_batch, selection_block
from sluice_engine.model.rotary import RotaryTable
from sluice_engine.model.views import PoolViews
from sluice_engine.model.weights import CompressorWeights, LayerWeights, ModelWeights
from sluice_kernels import index_store, kv_store
from sluice_kernels.compress import CSA_POOLING, HCA_POOLING, INDEX_POOLING, CompressPlan, Pooling, compress
from sluice_kernels.hyper_connect import collapse, expand, head
from sluice_kernels.index_logits import index_logits
from sluice_kernels.index_topk import index_topk
from sluice_kernels.moe import moe
from sluice_kernels.norm_rope import norm_rope, rms_norm, rotate_
from sluice_kernels.row_linear import grouped_linear, linear, padded_rows
from sluice_kernels.sparse_decode import Selection, sparse_decode
from sluice_kernels.sparse_prefill import sparse_prefill, window_keys
from sluice_kernels.view import LayerView
from sluice_records import LayerKind, SectionKind


class Turns:
    """Rotary turns of one batch for layers of one kind of rope."""

    def __init__(self, table: RotaryTable, positions: Tensor, *plans: CompressPlan | None) -> None:
        self.queries = table.at(positions)
        self.back = self.queries.conj().resolve_conj()
        self.entries = {plan.rate: table.at(plan.starts) for plan in plans if plan is not None}


class Model:
    """Owns weights, reads and writes records only through views."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, views: PoolViews) -> None:
        self.config = config
        self._weights = weights
        self._views = views
        self._main = RotaryTable(config.main_rope, config.rope_dim)
        self._compressed = RotaryTable(config.compress_rope, config.rope_dim)

    def forward(self, runs: list[Run], records: BatchRecords) -> Tensor:
        """fp32 logits [tokens wanted, vocabulary]; the batch's KV is in the records afterwards."""
        with torch.inference_mode():
            return self._forward(runs, records)

    def _forward(self, runs: list[Run], records: BatchRecords) -> Tensor:
        plan = plan_batch(self.config, runs)
        main = Turns(self._main, plan.positions)
        compressed = Turns(self._compressed, plan.positions, plan.csa, plan.hca)
        embedded = self._weights.embed.index_select(0, plan.tokens).float()
        streams = embedded.unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        eps = self.config.rms_eps
        views = self._views.acquire(records)
        for layer, weights in enumerate(self._weights.layers):
            turns = main if self.config.layers[layer] is LayerKind.SLIDING else compressed
            read, write = views(layer)
            block = _LayerPass(self.config, weights, plan, turns, read, write)
            x, post, comb = collapse(streams, weights.attn_hc)
            streams = expand(streams, block.attention(rms_norm(x, weights.attn_norm, eps)), post, comb)
            x, post, comb = collapse(streams, weights.ffn_hc)
            y = moe(rms_norm(x, weights.ffn_norm, eps), plan.tokens, weights.moe)
            streams = expand(streams, y, post, comb)
        return self._logits(streams, plan)

    def _logits(self, streams: Tensor, plan: BatchPlan) -> Tensor:
        wanted = plan.samples.shape[0]
        if not wanted:
            return streams.new_empty(0, self.config.vocab_size)
        places = torch.nn.functional.pad(plan.samples, (0, padded_rows(wanted) - wanted))
        x = head(streams.index_select(0, places), self._weights.hc_head)
        return linear(rms_norm(x, self._weights.norm, self.config.rms_eps), self._weights.head)[:wanted]


class _LayerPass:
    """Attention of one layer over one batch."""

    def __init__(
        self,
        config: ModelConfig,
        weights: LayerWeights,
        plan: BatchPlan,
        turns: Turns,
        read: LayerView,
        write: LayerView,
    ) -> None:
        self.config, self.weights, self.plan, self.turns = config, weights, plan, turns
        self.read, self.write = read, write
        self.kind = config.layers[read.layer]

    def attention(self, x: Tensor) -> Tensor:
        """[n, hidden] of the normed block input [n, hidden]."""
        c, w = self.config, self.weights
        projected = linear(x, w.inputs)
        latent = rms_norm(projected[:, w.query], w.q_norm, c.rms_eps)
        queries = linear(latent, w.q_b).view(-1, c.heads, c.head_dim)
        queries = norm_rope(queries, None, c.rms_eps, self.turns.queries).mul_(c.head_dim**-0.5)
        kv = norm_rope(projected[:, w.kv], w.kv_norm, c.rms_eps, self.turns.queries)[: self.plan.count]
        self._compress(projected[: self.plan.count])
        near = self._store_window(kv)
        outputs = [
            self._attend(block, queries[block.tokens], latent[block.tokens], projected[block.tokens], near)
            for block in self.plan.blocks
        ]
        mixed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        mixed = rotate_(mixed, self.turns.back)
        return linear(grouped_linear(mixed.view(x.shape[0], c.o_groups, -1), w.o_a), w.o_b)

    def _store_window(self, kv: Tensor) -> Tensor | None:
        """Write the rings; for chunks, return the keys of rings before and batch first."""
        plan, near = self.plan, None
        if plan.rings is not None:
            near = window_keys(self.read, plan.rings, kv_store.round_trip(self.read, SectionKind.WINDOW_KV, kv))
        values = kv if plan.put_tokens.shape == kv.shape[:1] else kv.index_select(0, plan.put_tokens)
        kv_store.store(self.write, SectionKind.WINDOW_KV, plan.put_rows, plan.put_slots, values)
        return near

    def _compress(self, projected: Tensor) -> None:
        w, plan = self.weights, self.plan
        if self.kind is LayerKind.HCA and plan.hca is not None and w.compressor is not None:
            entries = self._pool(HCA_POOLING, plan.hca, w.compressor, projected)
            if plan.hca.closes:
                kv_store.store(self.write, SectionKind.HCA_KV, plan.hca.rows, plan.hca.entries, entries)
        if self.kind is LayerKind.CSA and plan.csa is not None and w.compressor is not None and w.indexer is not None:
            entries = self._pool(CSA_POOLING, plan.csa, w.compressor, projected)
            keys = self._pool(INDEX_POOLING, plan.csa, w.indexer, projected)
            if plan.csa.closes:
                kv_store.store(self.write, SectionKind.CSA_KV, plan.csa.rows, plan.csa.entries, entries)
                index_store.store(self.write, plan.csa.rows, plan.csa.entries, keys)

    def _pool(self, pooling: Pooling, plan: CompressPlan, weights: CompressorWeights, projected: Tensor) -> Tensor:
        kv, gate = projected[:, weights.kv], projected[:, weights.gate]
        pooled = compress(self.write, pooling, plan, kv, gate, weights.bias)
        if not plan.closes:
            return pooled
        return norm_rope(pooled, weights.norm, self.config.rms_eps, self.turns.entries[plan.rate])

    def _attend(
        self, block: QueryBlock, queries: Tensor, latent: Tensor, projected: Tensor, near: Tensor | None
    ) -> Tensor:
        selection = block.hca if self.kind is LayerKind.HCA else None
        if self.kind is LayerKind.CSA:
            selection = block.everything or self._select(block, latent, projected)
        sinks, window = self.weights.sinks, block.window
        if near is None or window.sources is None:
            return sparse_decode(self.read, queries, window, selection, sinks)
        return sparse_prefill(self.read, queries, near, window.sources, window.mask, selection, sinks)

    def _select(self, block: QueryBlock, latent: Tensor, projected: Tensor) -> Selection:
        c, w = self.config, self.weights
        queries = linear(latent, w.index_q).view(-1, c.index_heads, c.index_head_dim)
        queries = rotate_(queries, self.turns.queries[block.tokens])
        weights = projected[:, w.index_weights] * (c.index_heads * c.index_head_dim) ** -0.5
        scores = index_logits(self.read, queries, weights, block.entries, block.rows)
        chosen = index_topk(scores, block.visible, c.index_topk)
        width = selection_block(c)
        chosen = torch.nn.functional.pad(chosen, (0, -chosen.shape[1] % width), value=-1)
        return Selection.build(SectionKind.CSA_KV, block.rows, chosen, width)
