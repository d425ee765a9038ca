"""What a rank spends on the host for the records of one step: its table, the mirror's checks, the tensors.

Usage: bench_tables.py [--rows 64] [--pages 1024] [--steps 200]

Every row has all its pages and decodes; a page is appended to one row in each step. Prints medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from sluice_engine.model.page_table import PageTable
from sluice_engine.model.views import PoolViews
from sluice_engine.pool import create_memory, map_pools
from sluice_engine.rank.mirror import RecordMirror
from sluice_engine.step import RecordRef
from sluice_records import CacheGeometry, CachePrecision, LayerKind, PoolPlan, RecordKind, build_layouts

GEOMETRY = CacheGeometry((LayerKind.CSA,), 8, 2, 4, 4, 4, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--pages", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    plan = PoolPlan(args.rows * args.pages + args.steps, args.rows, 1)
    layouts = build_layouts(GEOMETRY, CachePrecision.parse("fp32"), 16)
    mirror = RecordMirror(plan)
    pools = map_pools(create_memory(layouts, plan, "bench"), layouts, plan)
    views = PoolViews(pools, layouts, mirror)
    order = np.random.default_rng(0).permutation(plan[RecordKind.PAGE]).tolist()
    mirror.reserve([RecordRef(RecordKind.PAGE, page, 1) for page in order])
    mirror.reserve([RecordRef(RecordKind.STATE, row, 1) for row in range(args.rows)])
    table = PageTable(args.rows, args.pages)
    for row in range(args.rows):
        table.bind(row, row, order[row * args.pages : (row + 1) * args.pages])
    spare, rows = order[args.rows * args.pages :], list(range(args.rows))
    first, end = [args.pages - 1] * args.rows, [args.pages] * args.rows
    seconds = []
    for step in range(args.steps):
        began = time.perf_counter()
        table.append(step % args.rows, (spare[step],))
        views.acquire(table.take(rows, first, end))(0)
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds) * 1e3
    print(f"{args.rows} rows x {args.pages} pages: {median:.3f} ms a step on the host")


if __name__ == "__main__":
    main()
