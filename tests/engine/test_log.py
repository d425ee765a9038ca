"""Log lines: the same fields for people and for machines, one line each, whatever is in them."""

from __future__ import annotations

import io
import json
import logging

import pytest

from sluice_protocol.service_spec import LogFormat
from sluice_runtime import log


@pytest.fixture(autouse=True)
def off_afterwards():
    yield
    log.configure(LogFormat.OFF, "")


def written(log_format: LogFormat) -> str:
    stream = io.StringIO()
    log.configure(log_format, "decode-0", stream)
    log.info("room opened", request="r-1", lease="l-1", tokens=7)
    log.warning("room failed", lease="l-1", detail='said "no"\nand went')
    return stream.getvalue()


def test_json_is_one_object_a_line() -> None:
    first, second = (json.loads(line) for line in written(LogFormat.JSON).splitlines())
    assert first["at"].endswith("Z")
    assert {key: first[key] for key in ("level", "service", "event", "request", "lease", "tokens")} == {
        "level": "info",
        "service": "decode-0",
        "event": "room opened",
        "request": "r-1",
        "lease": "l-1",
        "tokens": 7,
    }
    assert (second["level"], second["detail"]) == ("warning", 'said "no"\nand went')


def test_human_is_one_line_too_whatever_a_field_holds() -> None:
    first, second = written(LogFormat.HUMAN).splitlines()
    assert first.endswith("decode-0: room opened request=r-1 lease=l-1 tokens=7")
    assert second.endswith('decode-0 WARNING: room failed lease=l-1 detail="said \\"no\\"\\nand went"')


def test_each_line_has_its_own_time() -> None:
    stream = io.StringIO()
    log.configure(LogFormat.HUMAN, "decode-0", stream)
    for created in (0.25, 59.9995, 60.0, 0.25):
        record = logging.LogRecord("sluice", logging.INFO, "", 0, "said", (), None)
        record.created = created
        logging.getLogger("sluice").handle(record)
    times = [line.split()[0] for line in stream.getvalue().splitlines()]
    assert [time.removeprefix("1970-01-01T00:") for time in times] == [
        "00:00.250Z",
        "00:59.999Z",
        "01:00.000Z",
        "00:00.250Z",
    ]


def test_off_and_unconfigured_write_nothing(capsys) -> None:
    assert written(LogFormat.OFF) == ""
    log.info("nobody")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("log_format", [LogFormat.JSON, LogFormat.HUMAN])
def test_a_library_that_tells_a_url_tells_no_secret_of_it(log_format: LogFormat) -> None:
    """As the exporter of traces does of a collector that is away: urllib3 names path and query without the host."""
    stream = io.StringIO()
    log.configure(log_format, "gateway", stream)
    said = "HTTPConnectionPool(host='h', port=9): Max retries exceeded with url: /v1/traces?api_key=QSECRET1 (Caused by"
    logging.getLogger("exporter").warning("Transient error %s", said)
    log.warning("no collector", url="http://bob:hunter2PW@h:9/v1/traces?api_key=QSECRET1")
    try:
        raise OSError(said)
    except OSError:
        logging.getLogger("exporter").exception("failed")
    told = stream.getvalue()
    assert "QSECRET1" not in told
    assert "hunter2PW" not in told
    assert told.count("/v1/traces?(not told)") == 3
