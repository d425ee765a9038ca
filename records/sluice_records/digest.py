"""Record digest: 64 bits over 32-bit lanes by multiply-and-add with a pseudo-random 64-bit weight for every lane.

    digest = sum_i lane_i * weight_i   (mod 2^64)

over the payload's lanes, then the identity's. Weights are SplitMix64 of the lane number: any 64-bit value, not merely
an odd one, for two flipped top bits would cancel under odd weights. Equal on every device, for it is one wrapping sum.
Source: multiply-shift hashing of vectors (Dietzfelbinger et al.).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_MASK = 0xFFFFFFFFFFFFFFFF
# Lanes at a time: bounds the temporary of widened lanes.
_BLOCK = 1 << 16
# Identity lanes are weighted from here on, whatever the payload's length.
IDENTITY_LANE = 1 << 40


def weights(first: int, count: int) -> NDArray[np.uint64]:
    """Weights of lanes first..first+count-1, shape [count]."""
    with np.errstate(over="ignore"):
        z = (np.arange(first + 1, first + count + 1, dtype=np.uint64)) * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * _MIX1
        z = (z ^ (z >> np.uint64(27))) * _MIX2
        return np.asarray(z ^ (z >> np.uint64(31)))


@lru_cache(maxsize=8)
def _cached_weights(first: int, count: int) -> NDArray[np.uint64]:
    return weights(first, count)


def record_digest(payload: NDArray[np.uint8] | bytes | memoryview, identity: bytes) -> int:
    """Digest of `payload` (the record up to its trailer; a multiple of 4 bytes) salted with `identity` (16 bytes)."""
    lanes = np.frombuffer(payload, dtype="<u4")
    salt = np.frombuffer(identity, dtype="<u4").astype(np.uint64)
    all_weights = _cached_weights(0, len(lanes))
    # Arrays wrap without a word; only numpy's scalars would warn, so sums of blocks are Python's.
    total = int(np.add.reduce(salt * _cached_weights(IDENTITY_LANE, len(salt))))
    for start in range(0, len(lanes), _BLOCK):
        part = lanes[start : start + _BLOCK].astype(np.uint64)
        part *= all_weights[start : start + _BLOCK]
        total += int(np.add.reduce(part))
    return total & _MASK


@lru_cache(maxsize=8)
def _salted_weights(payload: int, identity: int) -> NDArray[np.uint64]:
    """Of so many lanes of a payload and, behind them, of an identity."""
    return np.concatenate([weights(0, payload), weights(IDENTITY_LANE, identity)])


def record_digests(payloads: Sequence[bytes | memoryview], identities: Sequence[bytes]) -> list[int]:
    """`record_digest` of each of `payloads`, all of one size and one at least, with its identity. A call of numpy's
    costs more than a small record's sum; all lanes are widened at once, so large ones are better taken one by one."""
    salted = b"".join(chain.from_iterable(zip(payloads, identities, strict=True)))
    lanes = np.frombuffer(salted, dtype="<u4").reshape(len(payloads), -1).astype(np.uint64)
    digests: list[int] = (lanes @ _salted_weights(len(payloads[0]) // 4, len(identities[0]) // 4)).tolist()
    return digests
