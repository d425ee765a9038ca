"""Whatever is written of a process may be sent to somebody: no password and no token of a URL is in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sluice_runtime.health.evidence import write_bundle
from sluice_runtime.health.recorder import Recorder, RecorderNames
from sluice_runtime.health.secrets import without_secrets
from sluice_runtime.health.verdict import Kind, Verdict

pytestmark = pytest.mark.slow

URL = "http://bob:hunter2PW@127.0.0.1:9/v1/traces?api_key=QSECRET1#QSECRET1"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", ""),
        ("http://collector:4318/v1/traces", "http://collector:4318/v1/traces"),
        (URL, "http://(not told)@127.0.0.1:9/v1/traces?(not told)"),
        ("--otlp=" + URL, "--otlp=http://(not told)@127.0.0.1:9/v1/traces?(not told)"),
        ("no http://a:b@c and https://d?e=f either", "no http://(not told)@c and https://d?(not told) either"),
        ("http://bob:pass/word@host/path", "http://(not told)@host/path"),
        ("http://bob:pass?word@host/path", "http://(not told)"),
        ("http://host/path?mail=a@secret", "http://(not told)"),
        ("http://host/path#secret", "http://host/path?(not told)"),
    ],
)
def test_of_a_url_host_and_path_are_told(text: str, told: str) -> None:
    assert without_secrets(text) == told


def test_no_file_of_a_bundle_has_a_secret(tmp_path: Path) -> None:
    recorder = Recorder.create(tmp_path / "recorder", RecorderNames(("leader.loop",)))
    verdict = Verdict(Kind.DEAD, "OSError", "leader", detail=f"cannot reach {URL}")
    about = {"spec": {"otlp": URL}, "arguments": ["--otlp", URL, f"--otlp={URL}"], "number": 1}
    argv = [sys.executable, "-c", "input()", "--otlp", URL]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as process:
        bundle = write_bundle(tmp_path / "evidence", tmp_path, recorder, verdict, {"child": process.pid}, about)
        process.kill()
    for path in bundle.iterdir():
        for secret in (b"hunter2PW", b"QSECRET1"):
            assert secret not in path.read_bytes(), path.name
    assert "--otlp http://(not told)@127.0.0.1:9/v1/traces?(not told)" in (bundle / "child.proc").read_text()
    assert json.loads((bundle / "about.json").read_text())["number"] == 1
