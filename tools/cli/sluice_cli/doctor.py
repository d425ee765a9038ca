"""Say in plain words what was wrong with a service: what was stuck, where, since when, and who waited for it. Reads an
evidence bundle (a folder incident-NNNN-REASON), or a copy of a flight recorder (the file `recorder` in a run
directory)."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from sluice_cli.diagnosis import diagnose
from sluice_cli.doctor_words import render
from sluice_cli.evidence import EvidenceError, open_evidence


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="BUNDLE_OR_RECORDER")
    parser.add_argument("--json", action="store_true", help="the findings as one JSON document")
    parser.add_argument("--show-tokens", action="store_true", help="the step records with their tokens (prompts!)")


def run(args: argparse.Namespace) -> int:
    """2: that cannot be read."""
    try:
        findings = diagnose(open_evidence(args.path), args.show_tokens)
    except EvidenceError as error:
        print(f"sluice doctor: {error}", file=sys.stderr)
        return 2
    print(json.dumps(findings, indent=1, default=str) if args.json else render(findings))
    return 0
