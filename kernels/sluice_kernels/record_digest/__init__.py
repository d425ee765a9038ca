"""`sluice_records.record_digest` where the record's bytes are a tensor."""

from __future__ import annotations

from sluice_kernels.record_digest import reference
from sluice_kernels.view import Tensor


def record_digest(payload: Tensor, identity: bytes) -> int:
    """`payload` uint8 [bytes], a multiple of 4; equal to the definition in `sluice_records`."""
    return reference.record_digest(payload, identity)
