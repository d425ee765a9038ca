"""The control path of several builds, run by run in between: what others do on the machine meets all of them alike.

Usage: compare_control.py TREE TREE... [--streams 64] [--tokens 300] [--runs 6]

A TREE is a checkout of this repository; all run in this one's environment. Prints per process the medians over the
runs of CPU microseconds per token, a column per tree; apart from them what the asking process took, chunks/s, first
token and gap.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
from contextlib import ExitStack
from pathlib import Path

from bench_control import Up, load

ROOTS = (
    "engine",
    "records",
    "protocol",
    "kernels",
    "services/gateway",
    "services/prefill",
    "services/decode",
    "tools/cli",
)


def start(tree: Path) -> Up:
    os.environ["PYTHONPATH"] = os.pathsep.join(str(tree.resolve() / root) for root in ROOTS)
    return Up()


def run(up: Up, streams: int, tokens: int) -> dict[str, float]:
    """CPU microseconds per token by process, and in all; chunks/s."""
    before, client = up.cpu(), client_cpu()
    told = load(up.url, "scripted", streams, tokens)
    spent = {name: cpu - before.get(name, 0.0) for name, cpu in up.cpu().items()}
    used = {name: cpu / told["chunks"] * 1e6 for name, cpu in spent.items()}
    asked = (client_cpu() - client) / told["chunks"] * 1e6
    return used | {
        "in all": sum(used.values()),
        "who asks": asked,
        "chunks/s": told["chunks_per_s"],
        "first token, ms": told["first_token_ms"],
        "gap p99, ms": told["gap_p99_ms"],
    }


def client_cpu() -> float:
    """Seconds, of the processes that asked and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", type=Path, nargs="+", metavar="TREE")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--runs", type=int, default=6)
    args = parser.parse_args()
    with ExitStack() as exits:
        ups = []
        for tree in args.trees:
            ups.append(start(tree))
            exits.callback(ups[-1].stop)
        for up in ups:
            run(up, args.streams, args.tokens)
        order = list(enumerate(ups))
        runs: list[list[dict[str, float]]] = [[] for _ in ups]
        for number in range(args.runs):
            for index, up in order if number % 2 else reversed(order):
                runs[index].append(run(up, args.streams, args.tokens))
        for name in sorted(runs[0][0]):
            medians = [statistics.median(one.get(name, 0.0) for one in of_tree) for of_tree in runs]
            if max(medians) >= 0.5:
                print(f"{name:32s}" + "".join(f"{median:12.1f}" for median in medians))


if __name__ == "__main__":
    main()
