"""The control path of several builds, run by run in between: what others do on the machine meets all of them alike.

Usage: compare_control.py TREE TREE... [--streams 64] [--tokens 300] [--runs 6] [--page-tokens N]
       [--peer URL MODEL DIR]

A TREE is a checkout of this repository; all run in this one's environment. Prints per process the medians over the
runs of CPU microseconds per token, a column per tree; apart from them what the asking process took, chunks/s, first
token and gap. With --peer another server is the last column: DIR has a NAME.pid for each of its processes. What we
do per record is paid per page: --page-tokens 64 are the blocks of Dynamo's mock workers.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
from contextlib import ExitStack
from pathlib import Path

import psutil
from bench_control import Up, load, page_tokens_flag

ROOTS = (
    "runtime",
    "engine",
    "records",
    "protocol",
    "kernels",
    "services/gateway",
    "services/prefill",
    "services/decode",
    "tools/launch",
    "tools/cli",
)


def start(tree: Path, *flags: str) -> Up:
    os.environ["PYTHONPATH"] = os.pathsep.join(str(tree.resolve() / root) for root in ROOTS)
    return Up(*flags)


class Peer:
    """Another server, with the processes whose ids are in files of `folder`, and their children."""

    def __init__(self, url: str, model: str, folder: str) -> None:
        self.url, self.model = url, model
        self._processes = {pid.stem: psutil.Process(int(pid.read_text())) for pid in Path(folder).glob("*.pid")}

    def cpu(self) -> dict[str, float]:
        return {
            f"peer {name}": sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))
            for name, process in self._processes.items()
        }


def run(up: Up | Peer, streams: int, tokens: int) -> dict[str, float]:
    """CPU microseconds per token by process, and in all; chunks/s."""
    before, client = up.cpu(), client_cpu()
    told = load(up.url, up.model if isinstance(up, Peer) else "scripted", streams, tokens)
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
    parser.add_argument("--page-tokens", type=int, default=0)
    parser.add_argument("--peer", nargs=3, metavar=("URL", "MODEL", "DIR"))
    args = parser.parse_args()
    with ExitStack() as exits:
        ups: list[Up | Peer] = []
        for tree in args.trees:
            up = start(tree, *page_tokens_flag(args.page_tokens))
            ups.append(up)
            exits.callback(up.stop)
        if args.peer:
            ups.append(Peer(*args.peer))
        for each in ups:
            run(each, args.streams, args.tokens)
        order = list(enumerate(ups))
        runs: list[list[dict[str, float]]] = [[] for _ in ups]
        for number in range(args.runs):
            for index, each in order if number % 2 else reversed(order):
                runs[index].append(run(each, args.streams, args.tokens))
        for name in sorted({name for of_tree in runs for name in of_tree[0]}):
            medians = [statistics.median(one.get(name, 0.0) for one in of_tree) for of_tree in runs]
            if max(medians) >= 0.5:
                print(f"{name:32s}" + "".join(f"{median:12.1f}" for median in medians))


if __name__ == "__main__":
    main()
