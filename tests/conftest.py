"""Of all tests: hypothesis without deadlines (these machines are noisy), the same examples in every CI run, and no log
handler that outlives the test which called a program's `main` in this process."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from sluice_protocol.service_spec import LogFormat
from sluice_runtime import log

settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("here"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


@pytest.fixture(autouse=True)
def _no_log_handler_outlives_its_test() -> Iterator[None]:
    """`main` of the gateway or an engine installs a handler for a stream that pytest closes with the test."""
    handlers = list(logging.root.handlers)
    yield
    if logging.getLogger("sluice").handlers:
        log.configure(LogFormat.OFF, "")
        logging.root.handlers[:] = handlers
