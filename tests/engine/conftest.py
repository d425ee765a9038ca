from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_double import Engine


@pytest.fixture(params=["lockstep", "overlap"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    built = Engine(overlap=request.param == "overlap")
    yield built
    built.run()
