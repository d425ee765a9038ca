"""Everything two engines must share before records may pass between them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Named facts, sorted by name; two fingerprints are equal only if every fact is."""

    facts: tuple[tuple[str, str], ...]

    @staticmethod
    def of(facts: Mapping[str, str]) -> Fingerprint:
        return Fingerprint(tuple(sorted(facts.items())))

    def as_dict(self) -> dict[str, str]:
        return dict(self.facts)

    @property
    def digest(self) -> bytes:
        """16 bytes that stand for the whole; salt of the block hash chain."""
        state = hashlib.blake2b(digest_size=16)
        for name, value in self.facts:
            state.update(f"{len(name)}:{name}={len(value)}:{value};".encode())
        return state.digest()

    def differences(self, other: Fingerprint) -> tuple[str, ...]:
        """Names of the facts that differ or are missing on one side, sorted."""
        if self.facts == other.facts:
            return ()
        mine, theirs = self.as_dict(), other.as_dict()
        return tuple(name for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name))
