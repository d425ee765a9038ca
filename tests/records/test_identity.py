"""Trailers, digests and chains: content has one name, and no small damage keeps it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_records import (
    TRAILER_BYTES,
    CacheGeometry,
    CachePrecision,
    LayerKind,
    RecordKind,
    Trailer,
    TrailerError,
    block_keys,
    build_layouts,
    extend_chain,
    record_digest,
    record_digests,
    record_identity,
)

ID = bytes(range(16))
identities = st.binary(min_size=16, max_size=16)
lanes = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=60)


def digest(values: list[int], identity: bytes = ID) -> int:
    return record_digest(np.array(values, dtype="<u4").tobytes(), identity)


@given(
    identities, st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.binary(max_size=99)
)
def test_trailers_come_back(identity: bytes, generation: int, valid: int, digest: int, rest: bytes) -> None:
    trailer = Trailer("ab" * 16, identity, generation, valid, digest)
    packed = trailer.pack()
    assert len(packed) == TRAILER_BYTES
    assert Trailer.unpack(packed + rest) == trailer
    assert Trailer.unpack(memoryview(packed)) == trailer
    assert trailer.is_in(packed + rest)
    for place in range(56):
        assert not trailer.is_in(packed[:place] + bytes([packed[place] ^ 1]) + packed[place + 1 :])
    assert not trailer.is_in(packed[:55])


@given(st.binary(max_size=200))
def test_other_bytes_are_no_trailer(data: bytes) -> None:
    if data[:4] != Trailer("00" * 16, ID, 0, 0, 0).pack()[:4]:
        with pytest.raises(TrailerError):
            Trailer.unpack(data)
    with pytest.raises(TrailerError):
        Trailer.unpack(Trailer("00" * 16, ID, 0, 0, 0).pack()[:40])


@given(lanes, st.data())
def test_a_flipped_bit_changes_the_digest(values: list[int], data: st.DataObject) -> None:
    lane, bit = data.draw(st.integers(0, len(values) - 1)), data.draw(st.integers(0, 31))
    other = list(values)
    other[lane] ^= 1 << bit
    assert digest(other) != digest(values)


@given(lanes.filter(lambda v: len(v) > 1), st.data())
def test_two_flipped_top_bits_do_not_cancel(values: list[int], data: st.DataObject) -> None:
    """Under odd weights of 32 bits they would: 2^31 * a + 2^31 * b = 0 mod 2^32 for odd a and b."""
    a, b = data.draw(st.lists(st.integers(0, len(values) - 1), min_size=2, max_size=2, unique=True))
    other = list(values)
    other[a] ^= 1 << 31
    other[b] ^= 1 << 31
    assert digest(other) != digest(values)


@given(lanes.filter(lambda v: len(v) > 1), st.data())
def test_swapped_lanes_change_the_digest(values: list[int], data: st.DataObject) -> None:
    a, b = data.draw(st.lists(st.integers(0, len(values) - 1), min_size=2, max_size=2, unique=True))
    if values[a] == values[b]:
        return
    other = list(values)
    other[a], other[b] = other[b], other[a]
    assert digest(other) != digest(values)


@given(lanes, identities, identities)
def test_the_identity_salts_the_digest(values: list[int], one: bytes, other: bytes) -> None:
    assert (digest(values, one) == digest(values, other)) == (one == other)


@given(lanes)
def test_appended_zeros_keep_the_digest_and_that_is_why_lengths_are_fixed(values: list[int]) -> None:
    """A record's length is its layout's, which the identity covers; the digest itself need not."""
    assert digest([*values, 0]) == digest(values)


@given(st.integers(0, 5), st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_the_digest_is_its_formula(blocks: int, seed: int) -> None:
    """sum of lane_i * splitmix64(i + 1), then identity lanes from 2^40, mod 2^64: by Python's integers."""
    values = np.random.default_rng(seed).integers(0, 2**32, blocks * 7 + 1).tolist()
    identity = np.frombuffer(ID, dtype="<u4").tolist()

    def weight(lane: int) -> int:
        mask = 2**64 - 1
        z = (lane + 1) * 0x9E3779B97F4A7C15 & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        return z ^ z >> 31

    wanted = sum(v * weight(i) for i, v in enumerate(values))
    wanted += sum(v * weight(2**40 + i) for i, v in enumerate(identity))
    assert digest(values) == wanted % 2**64


def test_a_long_record_is_the_sum_of_its_parts() -> None:
    """Across the blocks in which lanes are widened."""
    values = np.random.default_rng(1).integers(0, 2**32, 200_000, dtype=np.uint32)
    whole = record_digest(values.tobytes(), ID)
    none = record_digest(b"", ID)
    first, second = values.copy(), values.copy()
    first[100_000:] = 0
    second[:100_000] = 0
    parts = record_digest(first.tobytes(), ID) + record_digest(second.tobytes(), ID) - none
    assert parts % 2**64 == whole


@pytest.mark.parametrize("nbytes", [0, 4, 192, 8192])
def test_digests_of_many_are_those_of_each(nbytes: int) -> None:
    random = np.random.default_rng(3)
    payloads = random.integers(0, 256, (5, nbytes), dtype=np.uint8)
    ids = [random.bytes(16) for _ in payloads]
    rows = [row.data for row in payloads]
    assert record_digests(rows, ids) == [record_digest(row, id) for row, id in zip(rows, ids, strict=True)]


tokens = st.lists(st.integers(0, 2**32 - 1), max_size=70)


@given(tokens, st.integers(1, 20), identities)
def test_a_chain_is_that_of_its_prefixes(sequence: list[int], page: int, salt: bytes) -> None:
    keys = block_keys(salt, sequence, page)
    assert len(keys) == len(sequence) // page
    for n in range(len(keys) + 1):
        assert block_keys(salt, sequence[: n * page], page) == keys[:n]
    if keys:
        assert keys[0] == extend_chain(salt, sequence[:page])
        last = sequence[(len(keys) - 1) * page : len(keys) * page]
        assert keys[-1] == extend_chain(keys[-2] if len(keys) > 1 else salt, last)


@given(tokens.filter(lambda t: len(t) > 3), st.integers(1, 4), identities, st.data())
def test_any_other_token_or_salt_changes_all_later_keys(
    sequence: list[int], page: int, salt: bytes, data: st.DataObject
) -> None:
    keys = block_keys(salt, sequence, page)
    place = data.draw(st.integers(0, len(keys) * page - 1)) if keys else 0
    if not keys:
        return
    other = list(sequence)
    other[place] ^= 1
    changed = block_keys(salt, other, page)
    for n, (a, b) in enumerate(zip(keys, changed, strict=True)):
        assert (a == b) == (n < place // page)
    assert not set(keys) & set(block_keys(bytes(16 * [0xA5]) if salt != bytes(16 * [0xA5]) else ID, sequence, page))


def test_identity_tells_formats_and_kinds_apart() -> None:
    geometry = CacheGeometry((LayerKind.CSA,), 32, 8, 16, 8, 4, 16)
    found = {
        record_identity(build_layouts(geometry, CachePrecision.parse(p), 16)[kind], key)
        for p in ("fp32", "bf16", "fp8/fp4")
        for kind in RecordKind
        for key in (ID, bytes(16))
    }
    assert len(found) == 3 * 3 * 2
    assert all(len(identity) == 16 for identity in found)


def test_tokens_beyond_32_bits_are_an_error() -> None:
    with pytest.raises(OverflowError):
        extend_chain(ID, [2**32])


def test_digests_of_random_damage_do_not_collide(any_layouts: Any) -> None:
    rng = np.random.default_rng(2)
    base = rng.integers(0, 256, 4096, dtype=np.uint8)
    seen = {record_digest(base.tobytes(), ID)}
    for _ in range(3000):
        damaged = base.copy()
        damaged[rng.integers(0, 4096, 8)] ^= rng.integers(1, 256, 8, dtype=np.uint8)
        seen.add(record_digest(damaged.tobytes(), ID))
    assert len(seen) > 2990
