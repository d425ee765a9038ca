"""Bounds of one engine and named policies: values, decided at start."""

from __future__ import annotations

from dataclasses import dataclass

from sluice_protocol.engine_spec import SnapshotPolicy


@dataclass(frozen=True, slots=True)
class Limits:
    """`chunk_tokens`: chunk boundaries are its multiples, from position 0, whatever was cached.
    `step_tokens`: token budget of a step. `max_running`: sequences at once, rooms included. `check_every`: every n-th
    of the cached pages that a sequence reads again is verified before; snapshots always are."""

    page_tokens: int
    chunk_tokens: int
    step_tokens: int
    max_running: int
    max_context_tokens: int
    vocab_size: int
    snapshots: SnapshotPolicy = SnapshotPolicy.END_OF_PROMPT
    snapshot_outputs: bool = False
    check_every: int = 1

    def __post_init__(self) -> None:
        if self.chunk_tokens % self.page_tokens:
            raise ValueError(f"chunk_tokens {self.chunk_tokens} must be a multiple of page_tokens {self.page_tokens}")
        if self.step_tokens < self.chunk_tokens:
            raise ValueError(f"step_tokens {self.step_tokens} must be at least chunk_tokens {self.chunk_tokens}")

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    def chunk_end(self, start: int, num_tokens: int) -> int:
        """End of the chunk that starts at `start`: the next multiple, planned snapshot boundary, or the end."""
        end = min((start // self.chunk_tokens + 1) * self.chunk_tokens, num_tokens)
        boundary = self.snapshots.next_boundary(start, num_tokens, self.page_tokens)
        return end if boundary is None else min(end, boundary)
