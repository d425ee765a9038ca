"""What can go wrong in an engine, split by whose fault it is."""

from __future__ import annotations


class EngineError(Exception):
    """Base of this package's errors."""


class LedgerError(EngineError):
    """The leader's books do not add up: a bug of ours. Ends the engine, with evidence."""


class RankFault(EngineError):
    """A rank could not execute a step. Ends the engine, with evidence."""

    def __init__(self, rank: int, reason: str, detail: str) -> None:
        super().__init__(f"rank {rank}: {reason}: {detail}")
        self.rank, self.reason, self.detail = rank, reason, detail
