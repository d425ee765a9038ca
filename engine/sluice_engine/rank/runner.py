"""`ModelRunner`: the real model behind `BatchModel`. Keeps the row table, feeds batches, chooses tokens.

Stop tokens, lengths and the life of records are the leader's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from sluice_engine.model.checkpoint import no_progress
from sluice_engine.model.config import ModelConfig, load_model_config
from sluice_engine.model.forward import Model
from sluice_engine.model.page_table import PageTable
from sluice_engine.model.plan import Run
from sluice_engine.model.views import Gate, Mirror, PoolViews, no_wait
from sluice_engine.model.weights import ModelWeights, load_weights
from sluice_engine.pool import RecordPool
from sluice_engine.rank.device import SynchronousModel
from sluice_engine.rank.sampling import BadLogits, Choice, Logits, Occurrences, TokenMask, choose_tokens, token_logprobs
from sluice_engine.step import RowBinding, RowWork, SampledRow, StepDivergence
from sluice_protocol.sampling import Sampling
from sluice_records import Layouts, RecordKind


@dataclass(slots=True)
class _Row:
    sampling: Sampling
    last_token: int
    occurred: Occurrences | None
    mask: Callable[[], TokenMask] | None = field(default=None)
    failed: str = ""  # until it is bound again


def build_runner(
    directory: Path,
    layouts: Layouts,
    pools: Mapping[RecordKind, RecordPool],
    mirror: Mirror,
    *,
    threads: int = 1,
    progress: Callable[[int, int], None] = no_progress,
    gate: Gate = no_wait,
) -> ModelRunner:
    """Load a model directory. Raises ModelError. With one thread, bits do not depend on the batch (docs/adr/0030)."""
    torch.set_num_threads(threads)
    config = load_model_config(directory)
    return ModelRunner(config, load_weights(directory, config, progress), layouts, pools, mirror, gate)


class ModelRunner(SynchronousModel):
    """One rank's model. Not thread-safe: the step loop is its only caller."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        layouts: Layouts,
        pools: Mapping[RecordKind, RecordPool],
        mirror: Mirror,
        gate: Gate = no_wait,
    ) -> None:
        super().__init__()
        self._model = Model(config, weights, PoolViews(pools, layouts, mirror, gate))
        self._vocab = config.vocab_size
        self._page_tokens = layouts.page_tokens
        self._rows: dict[int, _Row] = {}
        self._table = PageTable()

    def bind(self, binding: RowBinding) -> None:
        occurred = None
        if binding.sampling.needs_history:
            occurred = Occurrences.of(binding.history, binding.prompt_tokens, self._vocab)
        self._rows[binding.row] = _Row(binding.sampling, binding.last_token, occurred)
        self._table.bind(binding.row, binding.state, binding.pages)

    def append_pages(self, row: int, pages: tuple[int, ...]) -> None:
        self._row(row)
        self._table.append(row, pages)

    def constrain(self, row: int, mask: Callable[[], TokenMask] | None) -> None:
        """Ask `mask` for the allowed tokens before every choice of this row, until it is bound again."""
        self._row(row).mask = mask

    def free(self, row: int) -> None:
        self._row(row)
        del self._rows[row]
        self._table.free(row)

    def run(self, work: tuple[RowWork, ...]) -> tuple[SampledRow, ...]:
        """Raises StepDivergence for work that the row table cannot mean. Bad logits fail their own row only."""
        if not work:
            return ()
        rows = [self._row(each.row) for each in work]
        runs = [self._run(each, row) for each, row in zip(work, rows, strict=True)]
        size = self._page_tokens
        records = self._table.take(
            [each.row for each in work],
            [run.start // size for run in runs],
            [(run.start + len(run.tokens) - 1) // size + 1 for run in runs],
        )
        logits = self._model.forward(runs, records).numpy()
        sampling = [(each, row) for each, row in zip(work, rows, strict=True) if each.sample]
        return self._sample(logits, sampling)

    def _sample(self, logits: Logits, sampling: list[tuple[RowWork, _Row]]) -> tuple[SampledRow, ...]:
        choices = [
            Choice(row.sampling, work.start + work.q_len, row.occurred, row.mask() if row.mask else None)
            for work, row in sampling
        ]
        sampled = []
        for n, token in enumerate(choose_tokens(logits, choices)):
            work, row = sampling[n]
            if isinstance(token, BadLogits) or row.failed:
                # The leader learns of it a step late: until it frees the row, the surplus step is fed something.
                row.failed, row.last_token = row.failed or str(token), 0
                sampled.append(SampledRow(work.row, (), failed=row.failed))
                continue
            row.last_token = token
            if row.occurred is not None:
                row.occurred.add(token)
            top = row.sampling.top_logprobs
            logprobs = () if top is None else (token_logprobs(logits[n], token, top),)
            sampled.append(SampledRow(work.row, (token,), logprobs))
        return tuple(sampled)

    def _run(self, work: RowWork, row: _Row) -> Run:
        tokens = work.tokens or (row.last_token,)
        if min(tokens) < 0 or max(tokens) >= self._vocab:
            raise StepDivergence(f"row {work.row} is fed tokens outside 0..{self._vocab - 1}, or has sampled none yet")
        pages = self._table.num_pages(work.row)
        if work.start < 0 or work.start + len(tokens) > pages * self._page_tokens:
            raise StepDivergence(f"row {work.row} is to run to {work.start + len(tokens)} but has {pages} pages")
        return Run(work.start, tokens, (len(tokens) - 1,) if work.sample else ())

    def _row(self, row: int) -> _Row:
        known = self._rows.get(row)
        if known is None:
            raise StepDivergence(f"row {row} is not bound")
        return known
