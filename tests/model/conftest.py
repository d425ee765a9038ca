"""A small world around the model: random checkpoints that no degenerate init makes easy, pools, and a driver."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice_engine.model.config import ModelConfig, load_model_config
from sluice_engine.model.forward import Model
from sluice_engine.model.plan import Run
from sluice_engine.model.weights import ModelWeights, load_weights
from sluice_engine.pool import RecordPool, create_memory, map_pools
from sluice_engine.views import BatchRecords, PoolViews
from sluice_records import CachePrecision, Layouts, Perturbation, PoolPlan, RecordKind, build_layouts

torch.set_num_threads(1)

CSA, HCA, SLIDING = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 32,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "max_position_embeddings": 4096,
    "partial_rotary_factor": 0.25,
    "layer_types": [SLIDING, SLIDING, CSA, HCA, CSA, HCA],
    "compress_rates": {CSA: 4, HCA: 16},
    "mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 4,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "sliding_window": 16,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 6,
    "num_nextn_predict_layers": 0,
    "initializer_range": 0.2,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 256,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}


def build_oracle(seed: int = 0, **changes: Any) -> Any:
    """transformers' model with random weights, also where it initialises to zeros or ones, which would hide bugs."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    config = DeepseekV4Config(**{**TINY, **changes})
    torch.manual_seed(seed)
    model = DeepseekV4ForCausalLM(config).eval()
    g = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("sinks", "position_bias")):
                p.copy_(torch.randn(p.shape, generator=g) * 0.5)
            if name.endswith("base") and "hc" in name:
                p.copy_(torch.randn(p.shape, generator=g) * 0.3)
            if name.endswith("norm.weight") or "layernorm" in name:
                p.copy_(1 + 0.1 * torch.randn(p.shape, generator=g))
        for name, b in model.named_buffers():
            if name.endswith("tid2eid"):
                for row in b:
                    row.copy_(torch.randperm(config.n_routed_experts, generator=g)[: len(row)])
            if name.endswith("e_score_correction_bias"):
                b.copy_(torch.randn(b.shape, generator=g) * 0.1)
    return model


class OpenMirror:
    """Every record may be read and written."""

    def check_readable(self, kind: RecordKind, record: int) -> None: ...

    def check_writable(self, kind: RecordKind, record: int) -> None: ...


@dataclass
class Held:
    state: int
    pages: list[int]
    tokens: list[int] = field(default_factory=list)


class World:
    """Pools of poisoned records, and sequences that own shuffled ones."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        *,
        page_tokens: int = 16,
        pages: int = 96,
        states: int = 40,
        seed: int = 0,
        perturbed: bool = False,
        precision: str = "fp32",
        mirror: Any = None,
        gate: Any = None,
    ) -> None:
        perturbation = Perturbation(seed + 7) if perturbed else None
        self.config = config
        self.layouts: Layouts = build_layouts(
            config.geometry(), CachePrecision.parse(precision), page_tokens, perturbation=perturbation
        )
        plan = PoolPlan(pages, states, states)
        self.pools: dict[RecordKind, RecordPool] = map_pools(
            create_memory(self.layouts, plan, "test"), self.layouts, plan
        )
        for pool in self.pools.values():
            pool.buffer[:] = 0xFF  # NaN in every float format
        extra = {} if gate is None else {"gate": gate}
        self.views = PoolViews(self.pools, self.layouts, mirror or OpenMirror(), **extra)
        self.model = Model(config, weights, self.views)
        self._free = {kind: list(range(plan[kind])) for kind in RecordKind}
        for free in self._free.values():
            random.Random(seed).shuffle(free)

    def take(self, kind: RecordKind) -> int:
        record = self._free[kind].pop()
        self.pools[kind].zero(record)
        return record

    def sequence(self) -> Held:
        return Held(self.take(RecordKind.STATE), [])

    def feed(self, *work: tuple[Held, Sequence[int]]) -> torch.Tensor:
        """Logits of every token fed [tokens, vocabulary], sequence by sequence."""
        runs, written = zip(*[self._run(*w) for w in work], strict=True)
        sequences = [s for s, _ in work]
        records = BatchRecords([s.state for s in sequences], [s.pages for s in sequences], list(written))
        return self.model.forward(list(runs), records)

    def _run(self, sequence: Held, tokens: Sequence[int]) -> tuple[Run, range]:
        start, end = len(sequence.tokens), len(sequence.tokens) + len(tokens)
        per = self.layouts.page_tokens
        while len(sequence.pages) * per < end:
            sequence.pages.append(self.take(RecordKind.PAGE))
        sequence.tokens.extend(tokens)
        wanted = tuple(range(len(tokens)))
        return Run(start, list(tokens), wanted), range(start // per, (end - 1) // per + 1)

    def resume(self, sequence: Held) -> Held:
        """A new sequence over the same (closed) pages, resumed through a snapshot; at a page boundary only."""
        assert len(sequence.tokens) % self.layouts.page_tokens == 0
        snapshot, state = self.take(RecordKind.SNAPSHOT), self.take(RecordKind.STATE)
        self.pools[RecordKind.STATE].copy_sections(sequence.state, self.pools[RecordKind.SNAPSHOT], snapshot)
        self.pools[RecordKind.SNAPSHOT].copy_sections(snapshot, self.pools[RecordKind.STATE], state)
        return Held(state, list(sequence.pages), list(sequence.tokens))

    def state_bytes(self, sequence: Held) -> list[bytes]:
        """Section by section, so that worlds with other layouts compare."""
        return self._sections(RecordKind.STATE, sequence.state)

    def page_bytes(self, sequence: Held) -> list[list[bytes]]:
        return [self._sections(RecordKind.PAGE, page) for page in sequence.pages]

    def _sections(self, kind: RecordKind, record: int) -> list[bytes]:
        data = self.pools[kind].record(record)
        sections = sorted(self.layouts[kind].sections, key=lambda s: (s.kind, s.layer, s.plane))
        return [data[s.offset : s.offset + s.nbytes].tobytes() for s in sections]


@dataclass
class Checkpoint:
    oracle: Any
    config: ModelConfig
    weights: ModelWeights
    directory: Path

    def world(self, **options: Any) -> World:
        return World(self.config, self.weights, **options)

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            return self.oracle(torch.tensor([list(tokens)]), use_cache=False).logits[0]


MakeCheckpoint = Callable[..., Checkpoint]


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    made: dict[str, Checkpoint] = {}

    def make(seed: int = 0, **changes: Any) -> Checkpoint:
        key = repr((seed, sorted(changes.items())))
        if key not in made:
            oracle = build_oracle(seed, **changes)
            directory = tmp_path_factory.mktemp("model")
            oracle.save_pretrained(directory)
            config = load_model_config(directory)
            made[key] = Checkpoint(oracle, config, load_weights(directory, config), directory)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny(make_checkpoint: MakeCheckpoint) -> Checkpoint:
    return make_checkpoint()
