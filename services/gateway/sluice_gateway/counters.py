"""What happened since the start, for people and for the supervisor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    requests: int = 0
    answered: int = 0
    refused: int = 0
    failed: int = 0
    disconnected: int = 0
    slow_clients: int = 0
    turned_away: int = 0
    retries: int = 0
