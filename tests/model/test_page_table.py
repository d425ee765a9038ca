"""The table of records of a rank's rows: what a batch gets is each row's own, whatever the rows did before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_engine.model.page_table import PageTable
from sluice_engine.rank.mirror import RecordMirror
from sluice_engine.step import RecordRef, StepDivergence
from sluice_records import PoolPlan, RecordKind

ROWS = st.integers(0, 20)
PAGES = st.lists(st.integers(0, 500), max_size=90)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("bind"), ROWS, st.integers(0, 500), PAGES),
        st.tuples(st.just("append"), ROWS, PAGES),
        st.tuples(st.just("free"), ROWS),
    ),
    max_size=30,
)


@given(EVENTS, st.lists(ROWS, unique=True, max_size=8))
def test_a_batch_has_each_rows_own_records_in_order(events, wanted):
    table, states, pages = PageTable(rows=2, pages=2), {}, {}
    for event in events:
        match event:
            case ("bind", row, state, bound):
                table.bind(row, state, bound)
                states[row], pages[row] = state, list(bound)
            case ("append", row, more) if row in states:
                table.append(row, more)
                pages[row] += more
            case ("free", row) if row in states:
                table.free(row)
                del states[row], pages[row]
    rows = [row for row in wanted if pages.get(row)]
    taken = table.take(rows, [0] * len(rows), [1] * len(rows))
    assert taken.states.tolist() == [states[row] for row in rows]
    for at, row in enumerate(rows):
        own = pages[row]
        assert table.num_pages(row) == len(own)
        assert taken.pages[at].tolist() == own + own[:1] * (taken.pages.shape[1] - len(own))
    if len(rows):
        assert taken.pages.shape[1] == max(len(pages[row]) for row in rows)


def test_what_a_batch_has_does_not_change_with_the_table():
    table = PageTable()
    table.bind(0, 1, [4, 5])
    taken = table.take([0], [0], [1])
    table.free(0)
    assert (taken.states.tolist(), taken.pages.tolist()) == ([1], [[4, 5]])


@pytest.mark.parametrize(("bad", "told"), [(2, "FREE"), (3, "FILLING")])
def test_one_record_among_many_that_may_not_be_touched_is_named(bad, told):
    mirror = RecordMirror(PoolPlan(8, 1, 1))
    mirror.reserve([RecordRef(RecordKind.PAGE, page, 1) for page in (0, 1, 4, 5)])
    mirror.begin_fill([RecordRef(RecordKind.PAGE, 3, 1)])
    fine = np.array([[0, 1], [4, 5]])
    mirror.check_all_readable(RecordKind.PAGE, fine)
    mirror.check_all_writable(RecordKind.PAGE, fine)
    for check in (mirror.check_all_readable, mirror.check_all_writable):
        with pytest.raises(StepDivergence, match=f"page record {bad}, which is {told}"):
            check(RecordKind.PAGE, np.array([[0, 1], [4, bad]]))


def test_a_closed_record_may_be_read_and_not_written():
    mirror = RecordMirror(PoolPlan(4, 1, 1))
    ref = RecordRef(RecordKind.PAGE, 2, 1)
    mirror.reserve([ref])
    mirror.close([ref])
    mirror.check_all_readable(RecordKind.PAGE, np.array([2]))
    with pytest.raises(StepDivergence, match="write to page record 2, which is LIVE and closed"):
        mirror.check_all_writable(RecordKind.PAGE, np.array([2]))
