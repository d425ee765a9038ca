"""`sluice up` over the scripted model: what it says, what it survives, what it leaves behind."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice_cli.http import stream_chat

pytestmark = [pytest.mark.process, pytest.mark.timeout(110)]


def ask(url: str, key: str = "") -> str:
    body = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0}
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)["choices"][0]["finish_reason"]


def test_it_serves_says_how_to_ask_and_ctrl_c_leaves_nothing(up):
    stack = up("--scripted", "--ask-sample")
    stack.wait("Ctrl-C stops it")
    assert ask(stack.url) in ("stop", "length")
    assert "prefill  pid" in stack.text
    assert "pulled over nixl" in stack.text
    assert "decode   pid" in stack.text
    curl = next(line for line in stack.lines if line.startswith("curl "))
    if shutil.which("curl"):
        told = subprocess.run(curl, shell=True, capture_output=True, text=True, timeout=30, check=True).stdout
        assert told.rstrip().endswith("data: [DONE]")
    assert stack.interrupt() == 0
    assert "stopping" in stack.text


@pytest.mark.parametrize("moment", ["starting", "gateway is ready"])
def test_ctrl_c_while_it_starts_is_an_orderly_end(up, moment):
    stack = up("--scripted")
    stack.wait(moment)
    assert stack.interrupt() == 0
    assert "died" not in stack.text


INTERRUPTED_AT = """
import os, signal, sys
from importlib.abc import MetaPathFinder
class Here(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Here())
from sluice_cli.__main__ import main
sys.exit(main(["up", "--scripted"]))
"""


@pytest.mark.parametrize("name", ["argparse", "sluice_cli.up", "numpy", "msgspec", "sluice_engine.spec"])
def test_ctrl_c_while_it_imports_says_nothing(name):
    argv = [sys.executable, "-c", INTERRUPTED_AT.format(name=name)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_at_any_moment_ends_without_a_traceback(up):
    for tenth in range(2, 16, 2):
        stack = up("--scripted", "--unified", "--transport", "stream")
        time.sleep(tenth / 10)
        assert stack.interrupt() in (0, 130), stack.text
        assert "Traceback" not in stack.text


def test_three_at_once_have_a_port_each(up):
    stacks = [up("--scripted", "--unified") for _ in range(3)]
    urls = {stack.url for stack in stacks}
    assert len(urls) == 3
    for stack in stacks:
        stack.wait("Ctrl-C stops it")
        assert ask(stack.url) in ("stop", "length")
    for stack in stacks:
        stack.process.send_signal(signal.SIGINT)
    for stack in stacks:
        assert stack.end() == 0


def test_a_second_ctrl_c_waits_for_nobody(up):
    stack = up("--scripted")
    stack.wait("Ctrl-C stops it")
    stack.note_pids()
    for _ in range(2):
        stack.process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    assert stack.end() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_terminated_one_ends_like_ctrl_c(up, number):
    stack = up("--scripted", "--unified")
    stack.wait("Ctrl-C stops it")
    stack.process.send_signal(number)
    assert stack.end() == 0


def test_it_serves_on_when_nobody_reads_what_it_says(up):
    stack = up("--scripted", "--unified")
    url = stack.url
    stack.wait("Ctrl-C stops it")
    stack.hangs_up = True
    stack.kill("sluice_gateway")
    until_answered(url)
    assert stack.interrupt() == 0


def until_answered(url):
    for _ in range(200):
        try:
            assert ask(url) in ("stop", "length")
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("it does not serve again")


def test_ctrl_s_in_its_terminal_holds_up_no_restart_and_no_end(up):
    """It waited in its own print: nothing was started again, nobody looked after, and SIGTERM unheard."""
    stack = up("--scripted", "--unified", terminal=True)
    url = stack.url
    stack.wait("Ctrl-C stops it")
    stack.stop_reading()
    for word in ("sluice_gateway", "sluice_engine.supervisor.supervise"):
        stack.kill(word)
        until_answered(url)
    assert stack.interrupt() == 0


def test_a_terminal_that_is_gone_ends_nothing(up):
    stack = up("--scripted", "--unified", terminal=True)
    url = stack.url
    stack.wait("Ctrl-C stops it")
    stack.hangs_up = True
    for word in ("sluice_gateway", "sluice_engine.supervisor.supervise"):
        stack.kill(word)
        until_answered(url)
    assert stack.interrupt() == 0


def test_when_it_is_killed_its_services_end_too(up):
    stack = up("--scripted")
    stack.wait("Ctrl-C stops it")
    stack.note_pids()
    stack.process.kill()
    stack.process.wait(10)
    stack.pids.discard(stack.process.pid)
    for _ in range(400):
        if not stack.left_behind():
            break
        time.sleep(0.1)
    assert stack.left_behind() == []
    home = Path(stack.home.name)
    assert len(list(home.glob("sluice-*/key"))) == 1
    following = up("--scripted", "--unified", env={"TMPDIR": str(home)})
    following.wait("Ctrl-C stops it")
    assert len(list(home.glob("sluice-*/key"))) == 1
    assert following.interrupt() == 0
    assert list(home.glob("sluice-*/")) == []


def test_services_that_are_killed_come_back_and_the_url_stays_true(up):
    stack = up("--scripted")
    url = stack.url
    stack.wait("Ctrl-C stops it")
    for word, name in (("sluice_gateway", "gateway"), ("sluice_prefill", "prefill-0"), ("sluice_decode", "decode-0")):
        before = stack.kill(word)
        stack.wait(rf"{name} died \(killed by SIGKILL\); starting it again", start=before)
        stack.wait(rf"{name} is ready", start=before)
        stack.wait(rf"serving again: {url}/v1", start=before)
        assert ask(url) in ("stop", "length")
    assert stack.interrupt() == 0


@pytest.mark.parametrize("word", ["sluice_decode", "sluice_prefill"])
def test_an_answer_that_loses_an_engine_is_what_it_would_have_been(up, word):
    stack = up("--scripted", "--max-context-tokens", "16384")
    stack.wait("Ctrl-C stops it")

    def pieces() -> Iterator[str]:
        for chunk in stream_chat(stack.url, "scripted", [{"role": "user", "content": "tell me"}], max_tokens=2500):
            yield from (choice["delta"].get("content") or "" for choice in chunk["choices"])

    undisturbed = "".join(pieces())
    disturbed = []
    for piece in pieces():
        disturbed.append(piece)
        if len(disturbed) == 20:
            stack.kill(word)
    assert "".join(disturbed) == undisturbed
    assert "died (killed by SIGKILL)" in stack.text
    stack.wait("serving again")
    assert stack.interrupt() == 0


def test_several_engines_of_each_role(up):
    stack = up("--scripted", "--prefill", "2", "--decode", "2", "--transport", "stream")
    stack.wait("Ctrl-C stops it")
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        assert f"{name} is ready" in stack.text
    for _ in range(4):
        ask(stack.url)
    assert stack.interrupt() == 0


def test_without_nixl_it_stops_and_says_what_would_do(up, broken_nixl):
    stack = up("--scripted", env=broken_nixl)
    assert stack.end() == 1
    assert "did not start" in stack.text
    assert "libnixl.so: cannot open shared object file" in stack.text
    assert "--transport stream" in stack.text


def test_the_byte_stream_needs_no_nixl(up, broken_nixl):
    stack = up("--scripted", "--transport", "stream", "--ask-sample", env=broken_nixl)
    stack.wait("pulled over stream")
    assert stack.interrupt() == 0


def test_a_taken_port_is_said_before_anything_starts(up):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        stack = up("--scripted", "--port", str(port))
        assert stack.end() == 1
    assert stack.lines == [
        f"sluice up: --port {port}: Address already in use; give another, or leave it out for a free one"
    ]


def test_api_keys_are_asked_for_and_used(up, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("sesame\n")
    stack = up("--scripted", "--api-keys-file", str(keys), "--ask-sample")
    stack.wait("Ctrl-C stops it")
    assert "first token after" in stack.text
    assert "Bearer $API_KEY" in stack.text
    assert stack.sluice("chat", "hi").returncode == 1
    assert stack.sluice("chat", "--api-key", "sesame", "--max-tokens", "4", "hi").returncode == 0
    assert stack.interrupt() == 0


def get(url: str, **headers: str) -> urllib.request.addinfourl:
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30)


def test_it_answers_at_another_address_says_what_that_means_and_lets_pages_in(up):
    stack = up("--scripted", "--host", "0.0.0.0", "--cors-origin", "http://localhost:3000")
    stack.wait("Ctrl-C stops it")
    assert ask(stack.url) in ("stop", "length")
    with get(f"{stack.url}/v1/models", Origin="http://localhost:3000") as answer:
        assert answer.headers["access-control-allow-origin"] == "http://localhost:3000"
    assert "warning: at --host 0.0.0.0 EVERYBODY who reaches this machine" in stack.text
    assert "--api-keys-file" in stack.text
    port = stack.url.rsplit(":", 1)[1]
    listening = Path("/proc/net/tcp").read_text()
    assert f" 00000000:{int(port):04X} 00000000:0000 0A " in listening
    assert stack.interrupt() == 0


def test_it_says_where_the_metrics_are(up):
    stack = up("--scripted")
    stack.wait("Ctrl-C stops it")
    [line] = [line for line in stack.lines if "metrics: " in line]
    with get(line.split("metrics: ")[1].split(" ")[0]) as answer:
        told = answer.read()
    assert b"sluice_gateway_queued" in told
    assert b'sluice_time_to_first_token_seconds_bucket{le="+Inf"' in told
    assert "warning" not in stack.text
    assert stack.interrupt() == 0
