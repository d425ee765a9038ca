"""Names of content: a hash chain over token blocks, and the identity of a record that covers a prefix.

One function for gateway, engines and the shared tier, so that equal content has equal names everywhere.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from sluice_records.layout import RecordLayout

ChainKey = bytes
KEY_BYTES = 16


def extend_chain(parent: ChainKey, tokens: Sequence[int]) -> ChainKey:
    """Key of `parent`'s content followed by `tokens` (each < 2^32). The chain starts at the fingerprint's digest."""
    state = hashlib.blake2b(parent, digest_size=KEY_BYTES)
    state.update(array("I", tokens).tobytes())
    return state.digest()


def block_keys(salt: ChainKey, tokens: Sequence[int], page_tokens: int) -> tuple[ChainKey, ...]:
    """Keys of all full blocks of `page_tokens` tokens, in order; a tail is left out."""
    keys, key = [], salt
    for end in range(page_tokens, len(tokens) + 1, page_tokens):
        key = extend_chain(key, tokens[end - page_tokens : end])
        keys.append(key)
    return tuple(keys)


def record_identity(layout: RecordLayout, key: ChainKey) -> bytes:
    """16 bytes: this layout's format and kind, for the tokens that `key` covers. Never a pool index or a generation."""
    state = hashlib.blake2b(key, digest_size=KEY_BYTES)
    state.update(layout.identity_suffix)
    return state.digest()
