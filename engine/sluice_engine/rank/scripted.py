"""A model without mathematics: tokens from a script, a settable cost per token, records of real size.

Load, fault and cluster tests run the real leader, leases and transfers over it. It writes into every record that a
real model would write, so that digests, handoffs and mix-ups show.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from sluice_engine.pool import Pools
from sluice_engine.rank.device import SynchronousModel
from sluice_engine.rank.mirror import WRITABLE, RecordMirror
from sluice_engine.step import RowBinding, RowWork, SampledRow, StepDivergence
from sluice_protocol.sampling import TokenLogprobs
from sluice_records import RecordKind


@dataclass(frozen=True, slots=True)
class Script:
    """`token_cost_us`: busy time per token in, `step_cost_us` per batch. Tokens come from first..last, printable ASCII
    by default: no stop token is among them, so an answer ends by `max_tokens` alone."""

    first: int = 32
    last: int = 126
    token_cost_us: float = 0.0
    step_cost_us: float = 0.0


_MASK = 0xFFFFFFFFFFFFFFFF
_GROWTH, _WEIGHT = 6364136223846793005, 2654435761
_NONE = memoryview(b"")


@dataclass(slots=True)
class _Row:
    """`content`: the 8 bytes of the state record that hold it. `is_plain`: no logprobs are wanted. `page` is a view of
    page record `page_record`."""

    state: int
    pages: list[int]
    last_token: int
    content: memoryview
    salt: int
    is_plain: bool
    page: memoryview = _NONE
    page_record: int = -1


class ScriptedModel(SynchronousModel):
    """The next token is a function of the state record's content, which is a function of all tokens so far.

    A stale state or page, or one of another sequence, therefore changes the answer.
    """

    def __init__(
        self, script: Script, pools: Pools, mirror: RecordMirror, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        super().__init__()
        self.script = script
        self._pools = pools
        self._mirror = mirror
        self._states, self._pages = mirror.states(RecordKind.STATE), mirror.states(RecordKind.PAGE)
        self._sleep = sleep
        self._rows: dict[int, _Row] = {}
        self._first, self._choices = script.first, script.last + 1 - script.first
        self._page_tokens = pools[RecordKind.PAGE].layout.page_tokens
        usable = [s for s in pools[RecordKind.STATE].layout.sections if s.kind.value == "window_kv"]
        if not usable or usable[0].nbytes < 8:
            raise ValueError("the scripted model keeps 8 bytes in the first window section: the layout has none")
        self._state_offset = usable[0].offset
        pages = pools[RecordKind.PAGE].layout.sections
        self._page_offset = pages[0].offset if pages else None

    def bind(self, binding: RowBinding) -> None:
        record = self._pools[RecordKind.STATE].memory(binding.state)
        content = record[self._state_offset : self._state_offset + 8].cast("Q")
        sampling = binding.sampling
        # Greedy is a function of the content; a temperature adds the seed to it.
        salt = _hashed(f"{sampling.seed}/{sampling.choice}") if sampling.temperature else 0
        self._rows[binding.row] = _Row(
            binding.state, list(binding.pages), binding.last_token, content, salt, sampling.top_logprobs is None
        )

    def append_pages(self, row: int, pages: tuple[int, ...]) -> None:
        self._row(row).pages.extend(pages)

    def free(self, row: int) -> None:
        self._row(row)
        del self._rows[row]

    def run(self, work: tuple[RowWork, ...]) -> tuple[SampledRow, ...]:
        cost = self.script.step_cost_us
        if self.script.token_cost_us:
            cost += self.script.token_cost_us * sum(each.q_len for each in work)
        if cost:
            self._sleep(cost / 1e6)
        return tuple([sampled for each in work if (sampled := self._run_row(each)) is not None])

    def _row(self, row: int) -> _Row:
        found = self._rows.get(row)
        if found is None:
            raise StepDivergence(f"row {row} is not bound")
        return found

    def _run_row(self, work: RowWork) -> SampledRow | None:
        """Written out in one piece: it runs for every token of every row."""
        row, tokens = self._rows.get(work.row) or self._row(work.row), work.tokens
        if self._states[row.state] != WRITABLE:
            self._mirror.check_writable(RecordKind.STATE, row.state)
        if tokens:
            content = self._feed(row, work.start, tokens)
        else:
            content, size = after(row.content[0], work.start, row.last_token), self._page_tokens
            if self._page_offset is not None:
                page = self._page(row, row.pages[work.start // size])
                page[self._page_offset + work.start % size] = content & 0xFF
        row.content[0] = content
        if not work.sample:
            return None
        # The high bits of a product depend on all bits of the content.
        draw = ((content ^ row.salt) * 0xD6E8FEB86659FD93 & _MASK) >> 32
        row.last_token = token = self._first + draw % self._choices
        return SampledRow(work.row, (token,), () if row.is_plain else (TokenLogprobs(0.0, (token,), (0.0,)),))

    def _feed(self, row: _Row, position: int, tokens: tuple[int, ...]) -> int:
        """Into the row's pages, a byte of the content after each token at its place; the content after all of them."""
        contents = after_each(row.content[0], position, tokens)
        if self._page_offset is not None:
            data, size, end = contents.astype(np.uint8).tobytes(), self._page_tokens, position + len(tokens)
            while position < end:
                place = position % size
                part, data = data[: size - place], data[size - place :]
                start = self._page_offset + place
                self._page(row, row.pages[position // size])[start : start + len(part)] = part
                position += len(part)
        return int(contents[-1])

    def _page(self, row: _Row, record: int) -> memoryview:
        """Raises StepDivergence unless it may be written."""
        if self._pages[record] != WRITABLE:
            self._mirror.check_writable(RecordKind.PAGE, record)
        if record != row.page_record:
            row.page, row.page_record = self._pools[RecordKind.PAGE].memory(record), record
        return row.page


def after(content: int, position: int, token: int) -> int:
    """Content before this token, the token and its place: nothing else makes the content after it."""
    return (content * _GROWTH + token * _WEIGHT + position + 1) & _MASK


def after_each(content: int, position: int, tokens: Sequence[int]) -> NDArray[np.uint64]:
    """`after` each of `tokens`, of which there is one at least, the first at `position`; uint64 [tokens].

    With x_i = token_i * weight + position + 1 + i it is growth^(i+1) * (content + sum of x_j / growth^(j+1), j <= i),
    mod 2^64, where growth has an inverse, for it is odd.
    """
    count = len(tokens)
    powers, inverses = _powers(1 << (count - 1).bit_length())
    fed = np.array(tokens, dtype=np.uint64) * np.uint64(_WEIGHT)
    fed += np.arange(position + 1, position + 1 + count, dtype=np.uint64)
    fed *= inverses[:count]
    contents: NDArray[np.uint64] = np.add.accumulate(fed)
    contents += np.uint64(content)
    contents *= powers[:count]
    return contents


@cache
def _powers(count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """growth^1 .. growth^count, and their inverses mod 2^64."""
    inverse = pow(_GROWTH, -1, 1 << 64)
    up, down = (np.full(count, factor, dtype=np.uint64) for factor in (_GROWTH, inverse))
    return np.multiply.accumulate(up), np.multiply.accumulate(down)


def _hashed(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
