"""How one row of KV or of index keys is stored. The only place where row sizes are written down.

Sources: `../shared/facts/deepseek.md` 2.13, 10. Sizes for the published head sizes (512 with 64 rope; index 128):

    kv    fp32 2048   bf16 1024   fp8 576 + 8 scales = 584
    index fp32  512   bf16  256   fp8 128 + 4 = 132   fp4 64 + 4 = 68
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

# One power-of-two scale (ue8m0, one byte) for so many fp8 values of KV, or fp4 values of index keys.
KV_SCALE_BLOCK = 64
FP4_SCALE_BLOCK = 32


class KvFormat(StrEnum):
    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"


class IndexFormat(StrEnum):
    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"
    FP4 = "fp4"


class Plane(StrEnum):
    """Parts of one kind that lie apart in a record: all rows of one plane, then all rows of the next."""

    DATA = "data"
    SCALES = "scales"
    GATES = "gates"


@dataclass(frozen=True, slots=True)
class CachePrecision:
    kv: KvFormat = KvFormat.BF16
    index_keys: IndexFormat = IndexFormat.BF16

    @staticmethod
    def parse(text: str) -> CachePrecision:
        """From "bf16" (both) or "fp8/fp4" (kv/index keys). Raises ValueError that lists what is allowed."""
        kv, _, index = text.partition("/")
        try:
            return CachePrecision(KvFormat(kv), IndexFormat(index or kv))
        except ValueError as error:
            allowed = f"kv {[f.value for f in KvFormat]}, index keys {[f.value for f in IndexFormat]}"
            raise ValueError(f"precision {text!r} is not KV or KV/INDEX with {allowed}") from error

    def __str__(self) -> str:
        return f"{self.kv.value}/{self.index_keys.value}"


@dataclass(frozen=True, slots=True)
class PlaneFormat:
    """One plane of a row: `row_bytes` bytes, seen as `dtype` (a torch dtype name; uint8 where a row mixes types)."""

    plane: Plane
    row_bytes: int
    dtype: str


def kv_planes(kv: KvFormat, head_dim: int, rope_dim: int) -> tuple[PlaneFormat, ...]:
    """fp8 rows are e4m3 values without the rope part, then the rope part in bf16; scales are padded to 8 bytes."""
    match kv:
        case KvFormat.FP32:
            return (PlaneFormat(Plane.DATA, head_dim * 4, "float32"),)
        case KvFormat.BF16:
            return (PlaneFormat(Plane.DATA, head_dim * 2, "bfloat16"),)
        case KvFormat.FP8:
            nope = head_dim - rope_dim
            return (
                PlaneFormat(Plane.DATA, nope + rope_dim * 2, "uint8"),
                PlaneFormat(Plane.SCALES, align_up(-(-nope // KV_SCALE_BLOCK), 8), "uint8"),
            )


def index_planes(index: IndexFormat, dim: int) -> tuple[PlaneFormat, ...]:
    """fp8: one fp32 scale a row. fp4: two e2m1 values a byte, low nibble first, one ue8m0 scale per 32 values."""
    match index:
        case IndexFormat.FP32:
            return (PlaneFormat(Plane.DATA, dim * 4, "float32"),)
        case IndexFormat.BF16:
            return (PlaneFormat(Plane.DATA, dim * 2, "bfloat16"),)
        case IndexFormat.FP8:
            return (PlaneFormat(Plane.DATA, dim, "float8_e4m3fn"), PlaneFormat(Plane.SCALES, 4, "float32"))
        case IndexFormat.FP4:
            return (
                PlaneFormat(Plane.DATA, dim // 2, "uint8"),
                PlaneFormat(Plane.SCALES, -(-dim // FP4_SCALE_BLOCK), "uint8"),
            )


def align_up(value: int, to: int) -> int:
    """The next multiple of `to`, `value` itself included."""
    return -(-value // to) * to
