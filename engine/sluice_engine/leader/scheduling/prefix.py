"""Prefix cache of the leader: which records hold which content. Bookkeeping only; the ledger counts the references.

A hit at boundary n needs pages 0..n-1 and a snapshot at n; the usable prefix is the deepest boundary that has both.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice

from sluice_engine.step import RecordRef
from sluice_records import ChainKey


@dataclass(slots=True)
class _Page:
    """`used`: higher than that of whatever was used before. `is_listed`: among those that may be leaves."""

    ref: RecordRef
    parent: ChainKey | None
    used: int
    children: int = 0
    is_listed: bool = False


@dataclass(frozen=True, slots=True)
class Match:
    """`pages`: leading cached pages. `resume`: (boundary in pages, snapshot) of the deepest one usable, or None."""

    pages: tuple[RecordRef, ...]
    resume: tuple[int, RecordRef] | None


class PrefixCache:
    """Snapshots are in LRU order. A chain of pages is touched from its end to its root, but grows the other way. The
    leaf used least recently is evicted next, and a chain of 65,000 pages is evicted without a walk of it for each page.
    `_leaves` is a heap of (used, key): an entry for every leaf, no newer than its last use, and for some that were."""

    def __init__(self) -> None:
        self._pages: dict[ChainKey, _Page] = {}
        self._leaves: list[tuple[int, ChainKey]] = []
        self._uses = 0
        self._snapshots: OrderedDict[ChainKey, RecordRef] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    def match(self, keys: Sequence[ChainKey], max_boundary: int) -> Match:
        """Longest cached chain of `keys`; resumable at most at boundary `max_boundary` (in pages)."""
        pages: list[RecordRef] = []
        for key in keys:
            page = self._pages.get(key)
            if page is None:
                break
            pages.append(page.ref)
        resume = None
        for boundary in range(min(len(pages), max_boundary), 0, -1):
            snapshot = self._snapshots.get(keys[boundary - 1])
            if snapshot is not None:
                resume = (boundary, snapshot)
                break
        return Match(tuple(pages), resume)

    def touch(self, keys: Sequence[ChainKey]) -> None:
        """These were used now; keys that are not cached are passed over."""
        for key in reversed(keys):
            page = self._pages.get(key)
            if page is not None:
                page.used = self._next_use()
            if key in self._snapshots:
                self._snapshots.move_to_end(key)

    def has_page(self, key: ChainKey) -> bool:
        return key in self._pages

    def has_snapshot(self, key: ChainKey) -> bool:
        return key in self._snapshots

    def insert_page(self, key: ChainKey, parent: ChainKey | None, ref: RecordRef) -> bool:
        """False, and nothing done, when the content is there already or its parent is not."""
        return bool(self.insert_chain([key], parent, [ref]))

    def insert_chain(
        self, keys: Sequence[ChainKey], parent: ChainKey | None, refs: Sequence[RecordRef]
    ) -> list[RecordRef]:
        """Pages that follow each other from `parent` on. Returns the records of those that were not there already: all,
        a part from somewhere to the end, or none, as when `parent` is not there."""
        pages, inserted = self._pages, []
        above = None if parent is None else pages.get(parent)
        if parent is not None and above is None:
            return []
        for key, ref in zip(keys, refs, strict=True):
            page = pages.get(key)
            if page is None:
                page = pages[key] = _Page(ref, parent, self._next_use())
                inserted.append(ref)
                if above is not None:
                    above.children += 1
            parent, above = key, page
        if inserted:
            self._list(keys[-1])  # the others are no leaves
        return inserted

    def _next_use(self) -> int:
        self._uses += 1
        return self._uses

    def _list(self, key: ChainKey) -> None:
        page = self._pages[key]
        if not page.is_listed:
            page.is_listed = True
            heappush(self._leaves, (page.used, key))

    def insert_snapshot(self, key: ChainKey, ref: RecordRef) -> bool:
        """False when there is one already, or the pages below it are gone."""
        if key in self._snapshots or key not in self._pages:
            return False
        self._snapshots[key] = ref
        return True

    def evict_snapshot(self, evictable: Callable[[RecordRef], bool]) -> RecordRef | None:
        """The least recently used evictable one leaves the cache."""
        for key, ref in self._snapshots.items():
            if evictable(ref):
                del self._snapshots[key]
                return ref
        return None

    def evict_page(self, evictable: Callable[[RecordRef], bool]) -> tuple[RecordRef, ...]:
        """The least recently used evictable leaf leaves the cache, and its snapshot with it; () when there is none."""
        passed: list[ChainKey] = []
        try:
            while self._leaves:
                used, key = heappop(self._leaves)
                page = self._pages[key]
                page.is_listed = False
                if page.children:
                    continue
                if used != page.used:
                    self._list(key)
                elif evictable(page.ref):
                    return self._evict(key, page)
                else:
                    passed.append(key)
            return ()
        finally:
            for key in passed:
                self._list(key)

    def _evict(self, key: ChainKey, page: _Page) -> tuple[RecordRef, ...]:
        del self._pages[key]
        if page.parent is not None:
            parent = self._pages[page.parent]
            parent.children -= 1
            if not parent.children:
                self._list(page.parent)
        snapshot = self._snapshots.pop(key, None)
        return (page.ref,) if snapshot is None else (page.ref, snapshot)

    def keys_of(self, refs: Collection[RecordRef]) -> tuple[set[ChainKey], set[ChainKey]]:
        """(keys whose page, keys whose snapshot) is one of `refs`. Looks at everything that is cached."""
        pages = {key for key, page in self._pages.items() if page.ref in refs}
        return pages, {key for key, ref in self._snapshots.items() if ref in refs}

    def below(self, keys: Collection[ChainKey]) -> set[ChainKey]:
        """Keys of the cached pages that stand on a page of one of `keys`, these excluded. Looks at all pages."""
        found: set[ChainKey] = set()
        clear: set[ChainKey] = set()
        for start in self._pages:
            key: ChainKey | None = start
            passed: list[ChainKey] = []
            while key is not None and key not in found and key not in clear:
                passed.append(key)
                key = self._pages[key].parent
                if key in keys:
                    break
            if key is not None and (key in keys or key in found):
                found.update(passed)
            else:
                clear.update(passed)
        return found

    def refs(self, pages: Iterable[ChainKey], snapshots: Iterable[ChainKey]) -> list[RecordRef]:
        """The records of those that are cached."""
        records = [self._pages[key].ref for key in pages if key in self._pages]
        return records + [self._snapshots[key] for key in snapshots if key in self._snapshots]

    def remove(self, pages: Collection[ChainKey], snapshots: Collection[ChainKey]) -> list[RecordRef]:
        """These leave the cache, and what they leave behind may be evicted as before. Whatever stands on one of `pages`
        must be among them. Returns the records that were cached."""
        removed = self.refs(pages, snapshots)
        for key in pages:
            self._pages.pop(key, None)
        for key in snapshots:
            self._snapshots.pop(key, None)
        for page in self._pages.values():
            page.children, page.is_listed = 0, False
        for page in self._pages.values():
            if page.parent is not None:
                self._pages[page.parent].children += 1
        self._leaves.clear()
        for key, page in self._pages.items():
            if not page.children:
                self._list(key)
        return removed

    def num_evictable(self, held: Iterable[tuple[Sequence[ChainKey], Sequence[RecordRef]]]) -> int:
        """Pages that could leave the cache, one leaf after the other. `held`: per sequence the keys and the records of
        its pages, from the first one on. What a held page stands on stays too, though the cache alone may hold it:
        sequences have own copies of pages that were cached before, and go on there."""
        stay: set[ChainKey] = set()
        for keys, records in held:
            stays = False
            for key, record in reversed(list(zip(keys, records, strict=False))):
                if key in stay:
                    break  # and so does all that it stands on
                page = self._pages.get(key)
                stays = stays or (page is not None and page.ref == record)
                if stays:
                    stay.add(key)
        return len(self._pages) - len(stay)

    def references(self) -> Iterator[RecordRef]:
        for page in self._pages.values():
            yield page.ref
        yield from self._snapshots.values()

    def boundaries(self, limit: int) -> tuple[ChainKey, ...]:
        """Most recently used resumable boundaries: hints for routing."""
        return tuple(islice(reversed(self._snapshots), limit))
