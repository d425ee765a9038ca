"""`sluice size`: what a model needs, from its config alone. Every byte count is asked of the layouts."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from sluice_engine.model.config import ModelConfig, load_model_config
from sluice_engine.model.errors import ModelError
from sluice_engine.model.tensors import weight_counts
from sluice_engine.spec import default_page_tokens
from sluice_records import CachePrecision, GeometryError, Layouts, RecordKind, build_layouts, sequence_cost

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    f"{prefix}i": 1024**power for power, prefix in enumerate("kmgt", start=1)
}
_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?)b?\s*$", re.IGNORECASE)


class SizeError(ValueError):
    """An option that makes no sense; names it and what would."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "print the bytes that a model's weights and cache records take"
    parser.add_argument("--config", type=Path, required=True, metavar="PATH", help="config.json, or its directory")
    parser.add_argument("--precision", metavar="KV[/INDEX]", help="of records: fp32, bf16 or fp8, index also fp4")
    parser.add_argument("--page-tokens", type=int, metavar="N", help="tokens of a page")
    parser.add_argument("--memory", metavar="SIZE", help="for records, e.g. 80GiB: print what fits")
    parser.add_argument("--context", type=int, metavar="N", help="tokens of one sequence (default: the model's limit)")


def run(args: argparse.Namespace) -> int:
    try:
        config = load_model_config(args.config)
        layouts = _layouts(config, args.precision, args.page_tokens)
        context = _context(config, args.context)
        memory = None if args.memory is None else parse_size(args.memory)
    except (ModelError, GeometryError, SizeError) as error:
        print(f"sluice size: {error}", file=sys.stderr)
        return 2
    for line in report(config, layouts, context, memory):
        print(line)
    return 0


def report(config: ModelConfig, layouts: Layouts, context: int, memory: int | None) -> Iterator[str]:
    yield from _weights(config)
    yield ""
    yield from _records(config, layouts, context)
    if memory is not None:
        yield ""
        yield from _fits(config, layouts, context, memory)


def _weights(config: ModelConfig) -> Iterator[str]:
    counts = weight_counts(config)
    yield f"weights: {counts.total:,} parameters"
    for part, parameters in sorted(counts.parameters.items(), key=lambda item: -item[1]):
        yield f"  {part.value:<20} {parameters:>20,}"
    yield f"  {'bytes in the files':<20} {_bytes(counts.file_bytes)}"
    yield f"  {'bytes when loaded':<20} {_bytes(counts.loaded_bytes)}  ({config.dtype})"


def _records(config: ModelConfig, layouts: Layouts, context: int) -> Iterator[str]:
    page = layouts.page
    payload = sum(section.nbytes for section in page.sections)
    yield f"records: precision {layouts.precision}, pages of {layouts.page_tokens} tokens"
    content, allocated = payload / layouts.page_tokens, page.stride / layouts.page_tokens
    yield f"  {'bytes per token':<20} {content:>20,.2f}  ({allocated:,.2f} with trailer and padding)"
    for kind in RecordKind:
        yield f"  {'bytes per ' + kind.value:<20} {_bytes(layouts[kind].stride)}"
    cost = sequence_cost(layouts, context)
    yield f"  a sequence of {context:,} tokens: {cost.pages:,} pages, {_bytes(cost.total).strip()}"
    limit = config.max_position_embeddings
    if context < limit:
        yield f"  (the model's own limit is {limit:,} tokens)"


def _fits(config: ModelConfig, layouts: Layouts, context: int, memory: int) -> Iterator[str]:
    yield f"in {_bytes(memory).strip()}:"
    cost = sequence_cost(layouts, context)
    yield f"  sequences of {context:,} tokens: {memory // cost.total:,}"
    left = memory - layouts.state.stride - layouts.snapshot.stride
    longest = max(left, 0) // layouts.page.stride * layouts.page_tokens
    note = "" if longest <= config.max_position_embeddings else ", beyond the model's limit"
    yield f"  longest single context: {longest:,} tokens{note}"


def _layouts(config: ModelConfig, precision: str | None, page_tokens: int | None) -> Layouts:
    geometry = config.geometry()
    try:
        chosen = CachePrecision.parse(precision or {"float32": "fp32", "bfloat16": "bf16"}[config.dtype])
    except ValueError as error:
        raise SizeError(f"--precision: {error}") from error
    tokens = page_tokens if page_tokens is not None else default_page_tokens(geometry)
    try:
        return build_layouts(geometry, chosen, tokens)
    except GeometryError as error:
        raise SizeError(f"--page-tokens: {error}") from error


def _context(config: ModelConfig, context: int | None) -> int:
    limit = config.max_position_embeddings
    if context is None:
        return limit
    if not 0 < context <= limit:
        raise SizeError(f"--context is {context}; give 1 to {limit}, the model's max_position_embeddings")
    return context


def parse_size(text: str) -> int:
    """Bytes of "80GiB", "512 MB", "1048576". Raises SizeError."""
    found = _SIZE.match(text)
    if found is None:
        raise SizeError(f"--memory is {text!r}; give a number and a unit, e.g. 80GiB or 512MB")
    return int(float(found[1]) * _UNITS[found[2].lower()])


def _bytes(count: int) -> str:
    scaled, unit = float(count), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if scaled < 1024:
            break
        scaled, unit = scaled / 1024, bigger
    return f"{count:>20,}" if unit == "B" else f"{count:>20,}  {scaled:,.2f} {unit}"
