"""Seconds since the epoch from and to what Kubernetes writes."""

from __future__ import annotations

from datetime import UTC, datetime


def rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(text: str) -> float | None:
    """None for what is no time."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
