"""Decode tokens/s of the CPU engine against transformers `generate`, same checkpoint, same run, one thread each.

    .venv/bin/python tools/bench/bench_decode.py models/NAME [--tokens 64] [--prompt 64] [--runs 5]

Greedy, batches of 1, 8 and 32 prompts of equal length, prefill left out on both sides (ours is timed by step;
theirs is the time of N tokens less the time of one). Refuses to print figures when the tokens differ.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from sluice_engine.model.config import load_model_config
from sluice_engine.pool import RecordPool, create_memory, map_pools
from sluice_engine.rank.mirror import RecordMirror
from sluice_engine.rank.runner import ModelRunner, build_runner
from sluice_engine.spec import default_page_tokens
from sluice_engine.step import RecordRef, RowBinding, RowWork
from sluice_protocol.sampling import Sampling
from sluice_records import CachePrecision, Layouts, PoolPlan, RecordKind, build_layouts

BATCHES = (1, 8, 32)


class Engine:
    """A runner over pools of its own, with every record reserved."""

    def __init__(self, directory: Path, rows: int, context: int) -> None:
        self.geometry = load_model_config(directory).geometry()
        page_tokens = default_page_tokens(self.geometry)
        self.layouts: Layouts = build_layouts(self.geometry, CachePrecision.parse("fp32"), page_tokens)
        self.per_row = -(-context // page_tokens)
        plan = PoolPlan(rows * self.per_row, rows, 1)
        self.pools: dict[RecordKind, RecordPool] = map_pools(
            create_memory(self.layouts, plan, "bench"), self.layouts, plan
        )
        mirror = RecordMirror(plan)
        for kind in (RecordKind.PAGE, RecordKind.STATE):
            for record in range(plan[kind]):
                mirror.reserve([RecordRef(kind, record, 1)])
        self.runner: ModelRunner = build_runner(directory, self.layouts, self.pools, mirror)

    def generate(self, prompts: list[list[int]], count: int) -> tuple[list[list[int]], float]:
        """(tokens of each prompt, decode seconds)."""
        for row in range(len(prompts)):
            self.pools[RecordKind.STATE].zero(row)
            pages = tuple(range(row * self.per_row, (row + 1) * self.per_row))
            for page in pages:
                self.pools[RecordKind.PAGE].zero(page)
            self.runner.bind(RowBinding(row, row, pages, 0, Sampling()))
        first = tuple(RowWork(row, 0, tuple(p), True) for row, p in enumerate(prompts))
        out = [[s.tokens[0]] for s in self.runner.run(first)]
        start = time.perf_counter()
        for step in range(count - 1):
            work = tuple(RowWork(row, len(p) + step, (), True) for row, p in enumerate(prompts))
            for tokens, sampled in zip(out, self.runner.run(work), strict=True):
                tokens.extend(sampled.tokens)
        return out, time.perf_counter() - start


def theirs(model: Any, prompts: list[list[int]], count: int) -> tuple[list[list[int]], float]:
    ids = torch.tensor(prompts)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def timed(tokens: int) -> tuple[Any, float]:
        start = time.perf_counter()
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, **options)
        return out, time.perf_counter() - start

    with torch.no_grad():
        _, prefill = timed(1)
        out, whole = timed(count)
    return out[:, ids.shape[1] :].tolist(), whole - prefill


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    from transformers import DeepseekV4ForCausalLM

    oracle = DeepseekV4ForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    engine = Engine(args.model, max(BATCHES), args.prompt + args.tokens)
    rng = random.Random(0)
    print(f"{args.model}: prompts of {args.prompt}, {args.tokens} tokens, medians of {args.runs}")
    print(f"{'batch':>6} {'ours tok/s':>12} {'transformers':>13} {'ratio':>7}")
    for size in BATCHES:
        prompts = [[rng.randrange(oracle.config.vocab_size) for _ in range(args.prompt)] for _ in range(size)]
        seconds: tuple[list[float], list[float]] = ([], [])
        for _ in range(args.runs):
            mine, took = engine.generate(prompts, args.tokens)
            seconds[0].append(took)
            other, took = theirs(oracle, prompts, args.tokens)
            seconds[1].append(took)
        differing = sum(a != b for a, b in zip(mine, other, strict=True))
        if differing > size // 16:
            print(f"batch {size}: {differing} of {size} outputs differ from transformers: no figures")
            return 1
        produced = size * (args.tokens - 1)
        rates = [produced / statistics.median(s) for s in seconds]
        note = f"  ({differing} outputs differ)" if differing else ""
        print(f"{size:>6} {rates[0]:>12,.0f} {rates[1]:>13,.0f} {rates[0] / rates[1]:>7.2f}{note}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
