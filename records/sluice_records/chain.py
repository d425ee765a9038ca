"""Names of content: a hash chain over token blocks, and the identity of a record that covers a prefix.

One function for gateway, engines and the shared tier, so that equal content has equal names everywhere.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from sluice_records.layout import RecordLayout

ChainKey = bytes
KEY_BYTES = 16


def extend_chain(parent: ChainKey, tokens: Sequence[int]) -> ChainKey:
    """Key of `parent`'s content followed by `tokens` (each < 2^32). The chain starts at the fingerprint's digest."""
    return blake2b(parent + array("I", tokens).tobytes(), digest_size=KEY_BYTES).digest()


def block_keys(salt: ChainKey, tokens: Sequence[int], page_tokens: int) -> tuple[ChainKey, ...]:
    """Keys of all full blocks of `page_tokens` tokens, in order; a tail is left out."""
    keys, key = [], salt
    packed = array("I", tokens)
    content, size = packed.tobytes(), page_tokens * packed.itemsize
    for end in range(size, len(content) + 1, size):  # `extend_chain`, with the tokens packed once
        key = blake2b(key + content[end - size : end], digest_size=KEY_BYTES).digest()
        keys.append(key)
    return tuple(keys)


def record_identity(layout: RecordLayout, key: ChainKey) -> bytes:
    """16 bytes: this layout's format and kind, for the tokens that `key` covers. Never a pool index or a generation."""
    return blake2b(key + layout.identity_suffix, digest_size=KEY_BYTES).digest()
