"""Tables of metrics: the name of each, what it says, and how it is made from a status.

The table is the documentation (`docs/metrics.md` is generated from it) and the code: nothing else is exported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Status = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Buckets:
    """`counts` has one place more than `bounds`, for what is above all of them; a place counts its own bucket alone."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


Sample = tuple[tuple[str, ...], float | Buckets]


class MetricKind(StrEnum):
    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """`samples` makes (label values, value) from a status; none when the status does not know."""

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    help: str
    samples: Callable[[Status], Iterator[Sample]]

    @property
    def exported(self) -> str:
        """The name in /metrics; a histogram's is that of its `_bucket`, `_sum` and `_count`."""
        return f"{self.name}_total" if self.kind is MetricKind.COUNTER else self.name


def table(specs: tuple[MetricSpec, ...]) -> Iterator[str]:
    """Its lines in Markdown."""
    yield "| name | kind | more labels | what it says |"
    yield "| --- | --- | --- | --- |"
    for spec in specs:
        labels = ", ".join(f"`{label}`" for label in spec.labels)
        yield f"| `{spec.exported}` | {spec.kind} | {labels} | {spec.help} |"
