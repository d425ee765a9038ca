"""The end of every record: its identity and the digest of its bytes."""

from __future__ import annotations

import struct
from typing import NamedTuple

MAGIC = 0x51C3A11E
_FIELDS = struct.Struct("<II16s16sQQ")
_WHOLE = struct.Struct(_FIELDS.format + "8x")
TRAILER_BYTES = 64
assert _WHOLE.size == TRAILER_BYTES
_MAGIC, _GENERATION = struct.Struct("<I"), struct.Struct("<Q")
_GENERATION_OFFSET = struct.calcsize("<II16s16s")


class TrailerError(ValueError):
    """Not a trailer of ours: wrong magic, or too short."""


class Trailer(NamedTuple):
    """`identity` covers format, kind and tokens; `generation` is the life of the record that holds it now. A tuple, for
    one is made for every record that is closed or pulled."""

    format_id: str
    identity: bytes
    generation: int
    valid_tokens: int
    digest: int

    def pack(self) -> bytes:
        """64 bytes; what a layout's trailer has beyond them stays as it is."""
        format_id, identity, generation, valid, digest = self
        return _WHOLE.pack(MAGIC, valid, bytes.fromhex(format_id), identity, generation, digest)

    def is_in(self, data: bytes | memoryview) -> bool:
        """Does `data` begin with exactly this trailer?"""
        return bytes(data[: _FIELDS.size]) == self.pack()[: _FIELDS.size]

    @staticmethod
    def unpack(data: bytes | memoryview) -> Trailer:
        if len(data) < _FIELDS.size:
            raise TrailerError(f"trailer of {len(data)} bytes is shorter than {_FIELDS.size}")
        magic, valid, format_id, identity, generation, digest = _FIELDS.unpack_from(data)
        if magic != MAGIC:
            raise TrailerError(f"magic is {magic:#010x}, not {MAGIC:#010x}")
        return Trailer(format_id.hex(), identity, generation, valid, digest)


def set_generation(memory: memoryview, start: int, generation: int) -> None:
    """In the trailer at `start`, and nothing else of it. Raises TrailerError where there is none of ours."""
    (magic,) = _MAGIC.unpack_from(memory, start)
    if magic != MAGIC:
        raise TrailerError(f"magic is {magic:#010x}, not {MAGIC:#010x}")
    _GENERATION.pack_into(memory, start + _GENERATION_OFFSET, generation)
