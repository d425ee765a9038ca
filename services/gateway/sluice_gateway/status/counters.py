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
    dropped_connections: int = 0
    retries: int = 0
    large_requests: int = 0
    large_refused: int = 0
    worker_deaths: int = 0
    refused_bodies: int = 0
