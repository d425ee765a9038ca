"""Logs: one line per change of state, on stderr, for people or as JSON. Fields are the same in both, and always include
the ids that lead from one process to the next: `request` (gateway and both engines), `lease` (both engines)."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from functools import lru_cache
from typing import TextIO

from sluice_protocol.service_spec import LogFormat
from sluice_runtime.health.secrets import values_without_secrets, without_secrets

_logger = logging.getLogger("sluice")
_logger.propagate = False
# What would not be one word of a line as it is.
_needs_quotes = re.compile(r'[\s"=]').search


class _Formatter(logging.Formatter):
    """`service`: the process that logs. Wall time, for people only."""

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
        return self.human(record.levelno, event, fields, record.created)

    def human(self, level: int, event: str, fields: Mapping[str, object], at_s: float) -> str:
        """`event` is told as it is."""
        told = "".join([f" {key}={_plain(value)}" for key, value in fields.items()])
        word = "" if level <= logging.INFO else f" {logging.getLevelName(level)}"
        return f"{_utc(at_s)} {self._service}{word}: {event}{told}"

    def line(self, level: int, event: str, fields: Mapping[str, object], at_s: float) -> str:
        """Of our own: no text of a library's is in `event`."""
        if self._as_json:
            return as_record(self._service, logging.getLevelName(level).lower(), event, fields, at_s=at_s)
        return self.human(level, event, fields, at_s)


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
    """An event that a person may want to look at."""
    _write(logging.WARNING, event, fields)


def _write(level: int, event: str, fields: dict[str, object]) -> None:
    """A request makes some ten lines, so they do not take the way of a library's, by a record with file, line, thread
    and process. What goes wrong is told as `logging` does it, and ends no process."""
    if not (_logger.handlers and _logger.isEnabledFor(level)):
        return
    for handler in _logger.handlers:
        if not (isinstance(handler, logging.StreamHandler) and isinstance(handler.formatter, _Formatter)):
            handler.handle(_logger.makeRecord(_logger.name, level, "", 0, event, (), None, extra={"fields": fields}))
            continue
        try:
            line = handler.formatter.line(level, event, fields, time.time()) + handler.terminator
            with handler.lock or nullcontext():
                handler.stream.write(line)
                handler.stream.flush()
        except Exception:
            handler.handleError(_logger.makeRecord(_logger.name, level, "", 0, event, (), None))


def _utc(seconds: float) -> str:
    return f"{_utc_second(int(seconds))}.{int(seconds % 1 * 1000):03d}Z"


@lru_cache(maxsize=1)
def _utc_second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def _plain(value: object) -> str:
    """One word of a line, without secrets."""
    if type(value) is int:
        return str(value)
    text = str(values_without_secrets(value))
    return json.dumps(text) if not text or _needs_quotes(text) else text
