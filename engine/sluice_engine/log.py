"""Logs: one line per change of state, on stderr, for people or as JSON. Fields are the same in both, and always include
the ids that lead from one process to the next: `request` (gateway and both engines), `lease` (both engines)."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache
from typing import TextIO

from sluice_engine.health.secrets import values_without_secrets, without_secrets

_logger = logging.getLogger("sluice")
_logger.propagate = False
# What would not be one word of a line as it is.
_needs_quotes = re.compile(r'[\s"=]').search


class LogFormat(StrEnum):
    HUMAN = "human"
    JSON = "json"
    OFF = "off"


class _Formatter(logging.Formatter):
    """`service`: who speaks. Wall time, for people only."""

    def __init__(self, service: str, as_json: bool) -> None:
        super().__init__()
        self._service = service
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = getattr(record, "fields", {})
        event = without_secrets(record.getMessage())  # a library may tell the URL it was given
        if record.exc_info:
            fields = fields | {"exception": self.formatException(record.exc_info)}
        if self._as_json:
            return as_record(self._service, record.levelname.lower(), event, fields, at_s=record.created)
        told = " ".join(f"{key}={_plain(value)}" for key, value in values_without_secrets(fields).items())
        level = "" if record.levelno <= logging.INFO else f" {record.levelname}"
        return f"{_utc(record.created)} {self._service}{level}: {event}{' ' if told else ''}{told}"


def as_record(service: str, level: str, event: str, fields: Mapping[str, object], *, at_s: float | None = None) -> str:
    """One JSON line without its end. `at_s`: seconds of wall time; None: now."""
    head = {"at": _utc(time.time() if at_s is None else at_s), "level": level, "service": service}
    return json.dumps(head | {"event": event} | values_without_secrets(dict(fields)), default=str)


def configure(log_format: LogFormat, service: str, stream: TextIO | None = None) -> None:
    """Once per process, by its `main`. Until then, and with OFF, nothing is written."""
    for handler in list(_logger.handlers):
        _logger.removeHandler(handler)
    if log_format is LogFormat.OFF:
        _logger.setLevel(logging.CRITICAL + 1)
        return
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Formatter(service, log_format is LogFormat.JSON))
    _logger.addHandler(handler)
    _logger.setLevel(logging.INFO)
    logging.root.handlers[:] = [handler]  # what libraries say comes in the same form


def info(event: str, **fields: object) -> None:
    """A change of state that is as it should be."""
    _write(logging.INFO, event, fields)


def warning(event: str, **fields: object) -> None:
    """One that somebody may want to look at."""
    _write(logging.WARNING, event, fields)


def _write(level: int, event: str, fields: dict[str, object]) -> None:
    """A request makes some ten lines: nobody looks for the file and line that said it."""
    if _logger.handlers and _logger.isEnabledFor(level):
        _logger.handle(_logger.makeRecord(_logger.name, level, "", 0, event, (), None, extra={"fields": fields}))


def _utc(seconds: float) -> str:
    return f"{_utc_second(int(seconds))}.{int(seconds % 1 * 1000):03d}Z"


@lru_cache(maxsize=1)
def _utc_second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def _plain(value: object) -> str:
    text = str(value)
    return json.dumps(text) if not text or _needs_quotes(text) else text
