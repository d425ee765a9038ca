"""A small world around the model: random checkpoints that no degenerate init makes easy, pools, and a driver."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sluice_engine.model.config import ModelConfig, load_model_config
from sluice_engine.model.forward import Model
from sluice_engine.model.page_table import PageTable
from sluice_engine.model.plan import Run
from sluice_engine.model.tensors import Part, TensorSpec, expected_tensors
from sluice_engine.model.views import PoolViews
from sluice_engine.model.weights import ModelWeights, load_weights
from sluice_engine.pool import RecordPool, create_memory, map_pools
from sluice_records import CachePrecision, Layouts, Perturbation, PoolPlan, RecordKind, build_layouts

torch.set_num_threads(1)

CSA, HCA, SLIDING = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
TINY: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "dtype": "float32",
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


def random_tensors(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Under module names. Nothing is zero or one that training would move: degenerate values hide bugs."""
    g = torch.Generator().manual_seed(seed)
    return {spec.name: _random(spec, config, g) for spec in expected_tensors(config)}


def _random(spec: TensorSpec, config: ModelConfig, g: torch.Generator) -> torch.Tensor:
    leaf = spec.name.rpartition(".")[2]
    if leaf == "tid2eid":
        rows = [torch.randperm(config.experts, generator=g)[: spec.shape[1]] for _ in range(spec.shape[0])]
        return torch.stack(rows)
    noise = torch.randn(spec.shape, generator=g)
    if spec.part is Part.NORMS:
        return 1 + 0.1 * noise
    if leaf.endswith("scale"):
        return 1 + 0.05 * noise
    spread = {"sinks": 0.5, "position_bias": 0.5, "base": 0.3, "hc_base": 0.3, "e_score_correction_bias": 0.1}
    return noise * spread.get(leaf, 0.2)


class OpenMirror:
    """Every record may be read and written."""

    def check_all_readable(self, kind: RecordKind, records: Any) -> None: ...

    def check_all_writable(self, kind: RecordKind, records: Any) -> None: ...


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
        table = PageTable(rows=1, pages=1)
        for row, sequence in enumerate(sequences):
            table.bind(row, sequence.state, sequence.pages)
        rows, first, end = range(len(sequences)), [pages.start for pages in written], [pages.stop for pages in written]
        return self.model.forward(list(runs), table.take(rows, first, end))

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
    config: ModelConfig
    weights: ModelWeights
    directory: Path

    def world(self, **options: Any) -> World:
        return World(self.config, self.weights, **options)

    @cached_property
    def oracle(self) -> Any:
        """transformers' model of the same files; only slow tests ask for it (its import alone takes seconds)."""
        from transformers import DeepseekV4ForCausalLM

        return DeepseekV4ForCausalLM.from_pretrained(self.directory, dtype=torch.float32).eval()

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
            directory = tmp_path_factory.mktemp("model")
            (directory / "config.json").write_text(json.dumps({**TINY, **changes}))
            config = load_model_config(directory)
            save_file(random_tensors(config, seed), directory / "model.safetensors", metadata={"format": "pt"})
            made[key] = Checkpoint(config, load_weights(directory, config), directory)
        return made[key]

    return make


@pytest.fixture(scope="session")
def open_checkpoint() -> Callable[[Path], Checkpoint]:
    """An existing model directory."""

    def open_(directory: Path) -> Checkpoint:
        config = load_model_config(directory)
        return Checkpoint(config, load_weights(directory, config), directory)

    return open_


@pytest.fixture(scope="session")
def tiny(make_checkpoint: MakeCheckpoint) -> Checkpoint:
    return make_checkpoint()
