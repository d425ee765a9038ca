"""Break services on purpose and see what is said of it: the fault matrix, and storms of clients that go away.
Needs a checkout, for fault injection is in no wheel: `make setup`."""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from pathlib import Path


def _count(text: str) -> int:
    """From 1 on: a run of nothing would find nothing."""
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="chaos", required=True, metavar="KIND")
    matrix = kinds.add_parser("matrix", help="every fault, in every phase: is it named, in time, with evidence?")
    matrix.add_argument("--rows", default="*", metavar="GLOB", help="of these names only, e.g. 'leader-*/decode/*'")
    matrix.add_argument(
        "--floor", type=_seconds, default=5.0, metavar="S", help="least budget of the verdict (30 in use)"
    )
    matrix.add_argument("--ci", action="store_true", help="the rows that `make test` runs")
    matrix.add_argument("--unscaled", action="store_true", help="one row per reason, with the budgets that are in use")
    matrix.add_argument("--repeat", type=_count, default=1, metavar="N")
    matrix.add_argument("--results", type=Path, metavar="FILE", help="JSON lines; a run goes on where they end")
    matrix.add_argument("--list", action="store_true", help="say which rows there are, and run none")
    storm = kinds.add_parser("storm", help="many sessions in every phase dropped at once; then one request")
    storm.add_argument("--sessions", type=_count, default=64, metavar="N")
    storm.add_argument("--rounds", type=_count, default=20, metavar="N")


def run(args: argparse.Namespace) -> int:
    """0: all as it should be. 1: something was not. 2: it cannot be run here."""
    if importlib.util.find_spec("sluice_faults") is None:
        print("sluice chaos: no fault injection is installed; it comes with a checkout: `make setup`", file=sys.stderr)
        return 2
    from sluice_harness import command

    if args.chaos == "storm":
        return command.storm(args.sessions, args.rounds)
    if args.list:
        return command.show_rows(args.rows, ci=args.ci, unscaled=args.unscaled)
    return command.matrix(
        args.rows, args.floor, ci=args.ci, unscaled=args.unscaled, repeat=args.repeat, results=args.results
    )
