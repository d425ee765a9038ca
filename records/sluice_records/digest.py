"""Record digest: 64 bits over 32-bit lanes by multiply-and-add with a pseudo-random 64-bit weight for every lane.

    digest = sum_i lane_i * weight_i   (mod 2^64)

over the payload's lanes, then the identity's. Weights are SplitMix64 of the lane number: any 64-bit value, not merely
an odd one, for two flipped top bits would cancel under odd weights. Equal on every device, for it is one wrapping sum.
Source: multiply-shift hashing of vectors (Dietzfelbinger et al.).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

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


def record_digests(payloads: NDArray[np.uint8], identities: Sequence[bytes]) -> list[int]:
    """`record_digest` of each row of `payloads` (contiguous, [records, bytes]) with its identity. A call of numpy's
    costs more than a small record's sum; all lanes are widened at once, so large ones are better taken one by one."""
    lanes = payloads.view("<u4").astype(np.uint64)
    lanes *= _cached_weights(0, lanes.shape[1])
    salts = np.frombuffer(b"".join(identities), dtype="<u4").reshape(len(identities), -1).astype(np.uint64)
    salts *= _cached_weights(IDENTITY_LANE, salts.shape[1])
    digests: list[int] = (np.add.reduce(lanes, axis=1) + np.add.reduce(salts, axis=1)).tolist()
    return digests
