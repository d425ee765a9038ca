"""The rows of the fault matrix that every change must pass, on real processes, with a floor of 2 s.

One service lives through all of them; whoever ends is started again, as `sluice up` does.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sluice_harness.rows import Row, load_rows, select
from sluice_harness.runner import Runner, Scale

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]
FLOOR_S = 2.0


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner(Scale.of(FLOOR_S)) as running:
        yield running


@pytest.mark.parametrize("row", select(load_rows(), ci=True), ids=lambda row: row.id)
def test_the_fault_is_named_and_the_service_goes_on(runner: Runner, row: Row) -> None:
    result = runner.run(row)
    assert not result.problems, "\n".join(result.problems)
