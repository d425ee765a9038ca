"""What is told of a step record's frame in evidence: counts, and its tokens only when somebody asks for them."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from sluice_engine.step import StepDivergence, StepRecord, peek_step

_COUNTED = ("rows_freed", "released", "reserved", "filling", "committed", "reopened", "rows_bound", "pages_appended",
            "resumes", "snapshots", "closed")  # fmt: skip


def step_counts(frame: bytes, whole_bytes: int) -> dict[str, int]:
    """Lengths of the record's fields that have any; empty when the frame was kept in part only."""
    record = _record(frame, whole_bytes)
    if record is None:
        return {}
    told = {name: len(getattr(record, name)) for name in _COUNTED}
    told["prefill_tokens"] = sum(len(work.tokens) for work in record.work)
    told["decode_rows"] = sum(not work.tokens for work in record.work)
    told["pulled_records"] = sum(len(pull.items) for pull in record.pulls)
    return {name: count for name, count in told.items() if count}


def step_tokens(frame: bytes, whole_bytes: int) -> Any:
    """The whole record as plain values, with tokens; None when the frame was kept in part only."""
    record = _record(frame, whole_bytes)
    if record is None:
        return None
    named = {name: getattr(record, name) for name in StepRecord.__struct_fields__}
    return json.loads(msgspec.json.encode({name: value for name, value in named.items() if value or name == "number"}))


def _record(frame: bytes, whole_bytes: int) -> StepRecord | None:
    if len(frame) != whole_bytes:
        return None
    try:
        return peek_step(frame)
    except StepDivergence:
        return None
