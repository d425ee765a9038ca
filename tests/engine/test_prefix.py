"""Which page leaves the cache next: the leaf used least recently, found without going through the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_engine.leader.scheduling.prefix import PrefixCache
from sluice_engine.step import RecordRef
from sluice_records import ChainKey, RecordKind


def key_of(chain: tuple[int, ...]) -> ChainKey:
    return bytes(chain)


def keys_of(chain: tuple[int, ...]) -> list[ChainKey]:
    return [key_of(chain[: end + 1]) for end in range(len(chain))]


@dataclass
class ByTheWord:
    """The rule itself: all pages in the order of their last use, gone through from the oldest."""

    order: list[tuple[int, ...]] = field(default_factory=list)

    def use(self, chain: tuple[int, ...]) -> None:
        if chain in self.order:
            self.order.remove(chain)
        self.order.append(chain)

    def evict(self, evictable: Callable[[tuple[int, ...]], bool]) -> tuple[int, ...] | None:
        for chain in self.order:
            has_child = any(other[:-1] == chain for other in self.order)
            if not has_child and evictable(chain):
                self.order.remove(chain)
                return chain
        return None


CHAINS = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), CHAINS),
        st.tuples(st.just("insert the later half"), CHAINS),
        st.tuples(st.just("touch"), CHAINS),
        st.tuples(st.just("hold"), CHAINS),
        st.tuples(st.just("drop"), CHAINS),
        st.tuples(st.just("evict"), st.integers(1, 4)),
    ),
    max_size=60,
)


@given(EVENTS)
@settings(max_examples=300, deadline=None)
def test_the_leaf_used_least_recently_leaves_whatever_came_before(events):
    cache, rule, held = PrefixCache(), ByTheWord(), set()
    records: dict[RecordRef, tuple[int, ...]] = {}
    fresh = (RecordRef(RecordKind.PAGE, number, 1) for number in count())
    for what, which in events:
        if what == "insert":
            for end in range(1, len(which) + 1):
                chain, ref = which[:end], next(fresh)
                if cache.insert_page(key_of(chain), key_of(chain[:-1]) if end > 1 else None, ref):
                    records[ref] = chain
                    rule.use(chain)
        elif what == "insert the later half":
            first = len(which) // 2
            chains = {next(fresh): which[: end + 1] for end in range(first, len(which))}
            parent = key_of(which[:first]) if first else None
            for ref in cache.insert_chain(keys_of(which)[first:], parent, list(chains)):
                records[ref] = chains[ref]
                rule.use(chains[ref])
        elif what == "touch":
            cache.touch(keys_of(which))
            for end in range(len(which), 0, -1):
                if which[:end] in rule.order:
                    rule.use(which[:end])
        elif what in ("hold", "drop"):
            (held.add if what == "hold" else held.discard)(which)
        else:
            for _ in range(which):
                left = cache.evict_page(lambda ref: records[ref] not in held)
                assert (records[left[0]] if left else None) == rule.evict(lambda chain: chain not in held)
        assert len(cache) == len(rule.order)
        assert {records[ref] for ref in cache.references()} == set(rule.order)


class Counted(dict[ChainKey, object]):
    looks = 0

    def __getitem__(self, key: ChainKey) -> object:
        self.looks += 1
        return super().__getitem__(key)

    def __iter__(self):
        raise AssertionError("gone through from end to end")

    keys = items = values = __iter__  # type: ignore[assignment]


def test_a_long_chain_leaves_with_a_few_looks_a_page(monkeypatch):
    """A plan that makes room for a prompt of a million tokens evicts as many pages as it needs, in one go."""
    length = 3000
    cache = PrefixCache()
    keys = [number.to_bytes(16, "big") for number in range(length)]
    for number, key in enumerate(keys):
        cache.insert_page(key, keys[number - 1] if number else None, RecordRef(RecordKind.PAGE, number, 1))
    pages = Counted(cache._pages)
    monkeypatch.setattr(cache, "_pages", pages)
    left = [cache.evict_page(lambda ref: True)[0].record for _ in range(length)]
    assert left == list(reversed(range(length)))
    assert pages.looks < 6 * length
