from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from sluice_kernels.view import Tensor
from sluice_records.digest import IDENTITY_LANE, weights


@lru_cache(maxsize=8)
def _weights(first: int, count: int) -> Tensor:
    return torch.from_numpy(weights(first, count).view(np.int64).copy())


def record_digest(payload: Tensor, identity: bytes) -> int:
    """int64 wraps as uint64 does, so the sum is the same; lanes are widened without their sign."""
    salt = torch.frombuffer(bytearray(identity), dtype=torch.uint8)
    return (_lanes(payload, 0) + _lanes(salt, IDENTITY_LANE)) % (1 << 64)


def _lanes(data: Tensor, first: int) -> int:
    if not len(data):
        return 0
    lanes = data.view(torch.int32).long() & 0xFFFFFFFF
    return int((lanes * _weights(first, len(lanes))).sum())
