"""`sluice chat` against a gateway of a few lines, in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sluice_cli import notes, sample
from sluice_cli.__main__ import main
from sluice_cli.http import GatewayError, get_models, stream_chat

pytestmark = pytest.mark.slow


class Gateway(ThreadingHTTPServer):
    """Answers "n:last words" with n the number of messages it was sent; "break", "fail", "long" do what they say."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.key = ""
        self.busy = 0  # answers so many questions with "come back at once"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Gateway

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self._is_allowed():
            self._json(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        if not self._is_allowed():
            return
        word = body["messages"][-1]["content"]
        if self.server.busy:
            self.server.busy -= 1
            self._json(503, {"error": {"message": "no usable pair"}}, {"Retry-After": "0"})
            return
        if word == "fail":
            self._json(429, {"error": {"message": "the queue is full"}})
            return
        self.send_response(200)
        self.end_headers()
        for piece in (f"{len(body['messages'])}:", word):
            self._event({"choices": [{"delta": {"content": piece}, "finish_reason": None}]})
        if word == "break":
            return
        if word == "spoil":
            self._event({"error": {"message": "the pair died"}})
            return
        self._event({"choices": [{"delta": {}, "finish_reason": "length" if word == "long" else "stop"}]})
        self.wfile.write(b"data: [DONE]\n\n")

    def _is_allowed(self) -> bool:
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            self._json(401, {"error": {"message": "no such key"}})
            return False
        return True

    def _event(self, value: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _json(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in (headers or {}).items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


def chat(gateway: Gateway, typed: str, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sluice_cli", "chat", "--url", gateway.url, *argv],
        input=typed,
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_on_a_pipe_every_line_is_a_question_and_the_conversation_goes_on(gateway):
    told = chat(gateway, "one\ntwo\n/new\nthree\n")
    assert told.stdout == "1:one\n3:two\n1:three\n"
    assert (told.returncode, told.stderr) == (0, "")
    assert [m["content"] for m in gateway.asked[1]["messages"]] == ["one", "1:one", "two"]


def test_an_empty_line_ends_it(gateway):
    assert chat(gateway, "one\n\ntwo\n").stdout == "1:one\n"


def test_a_failed_question_is_taken_back_and_the_status_tells(gateway):
    told = chat(gateway, "one\nfail\nspoil\nbreak\ntwo\n")
    assert told.stdout.splitlines()[-1] == "3:two"
    assert told.returncode == 1
    for words in ("the queue is full", "the pair died", "ended before [DONE]"):
        assert words in told.stderr


def test_the_system_message_comes_from_the_option_or_a_file(gateway, tmp_path):
    (tmp_path / "notes.txt").write_text("Keep the notes.\n")
    for given in ("Keep the notes.", f"@{tmp_path / 'notes.txt'}"):
        assert main(["chat", "--url", gateway.url, "--system", given, "hello", "there"]) == 0
    expected = [{"role": "system", "content": "Keep the notes."}, {"role": "user", "content": "hello there"}]
    assert [asked["messages"] for asked in gateway.asked] == [expected, expected]


def test_it_comes_back_when_the_gateway_asks_to_but_not_for_ever(gateway, capsys):
    gateway.busy = 3
    assert main(["chat", "--url", gateway.url, "a"]) == 0
    assert (len(gateway.asked), capsys.readouterr().out) == (4, "1:a\n")
    gateway.busy = 100
    assert main(["chat", "--url", gateway.url, "a"]) == 1
    assert "no usable pair" in capsys.readouterr().err


def test_a_cut_answer_is_marked(gateway, capsys):
    assert main(["chat", "--url", gateway.url, "long"]) == 0
    told = capsys.readouterr()
    assert told.out == "1:long\n"
    assert told.err.startswith("(cut")


def test_max_tokens_is_left_to_the_gateway_unless_given(gateway):
    main(["chat", "--url", gateway.url, "a"])
    main(["chat", "--url", gateway.url, "--max-tokens", "7", "a"])
    assert [asked.get("max_tokens") for asked in gateway.asked] == [None, 7]


def test_a_url_with_v1_at_its_end_is_understood(gateway, capsys):
    assert main(["chat", "--url", f"{gateway.url}/v1", "a"]) == 0
    assert capsys.readouterr().out == "1:a\n"


def test_the_key_goes_with_every_request(gateway, capsys):
    gateway.key = "sesame"
    assert main(["chat", "--url", gateway.url, "a"]) == 1
    assert "no such key" in capsys.readouterr().err
    assert main(["chat", "--url", gateway.url, "--api-key", "sesame", "a"]) == 0


def test_without_a_gateway_it_says_what_to_do(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert main(["chat", "hi"]) == 1
    assert "no `sluice up` of yours runs on this machine" in capsys.readouterr().err
    notes.write_note("http://127.0.0.1:1", "m")
    assert main(["chat", "hi"]) == 1
    assert "Start a gateway with `sluice up`" in capsys.readouterr().err
    assert main(["chat", "--url", "https://example.org", "hi"]) == 1
    assert "no http://HOST:PORT address" in capsys.readouterr().err


def test_something_else_on_the_port_is_no_gateway(gateway):
    gateway.RequestHandlerClass = NotUs  # type: ignore[assignment]
    with pytest.raises(GatewayError, match="no gateway of Sluice"):
        get_models(gateway.url)


class NotUs(Handler):
    def do_GET(self) -> None:
        self._json(200, ["hello"])


def test_the_printed_curl_survives_quotes(gateway):
    line = sample.curl("http://h:1", "m", "it's", 'say "so"')
    body = subprocess.run(
        ["bash", "-c", line.replace("curl ", "printf '%s\\n' ", 1)], capture_output=True, text=True, check=True
    ).stdout.splitlines()[-1]
    assert [m["content"] for m in json.loads(body)["messages"]] == ["it's", 'say "so"']


@pytest.mark.parametrize(
    "written",
    [
        b'{"prompt": "hello"}',
        b"{",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"messages": []}',
        b'{"messages": ["hi"]}',
        b'{"messages": [{"role": "user"}]}',
        b'{"messages": [{"role": "user", "content": null}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "assistant", "content": "hi"}]}',
    ],
)
def test_a_sample_that_is_none_is_said_and_not_asked(written, tmp_path):
    """It ended what served, after "ready"."""
    (tmp_path / "sample.json").write_bytes(written)
    assert sample.question(tmp_path) == (sample.PLAIN, "")
    assert sample.problem(tmp_path).startswith(f"{tmp_path / 'sample.json'} is not asked: ")


def test_without_a_sample_there_is_nothing_to_say(tmp_path):
    assert (sample.problem(None), sample.problem(tmp_path)) == ("", "")
    assert sample.question(tmp_path) == (sample.PLAIN, "")
    (tmp_path / "sample.json").write_text(
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "ü"}]}'
    )
    assert (sample.problem(tmp_path), sample.question(tmp_path)) == ("", ("ü", "s"))


NO_TEXT = b"caf\xe9"


def chat_with(
    gateway: Gateway, typed: bytes | None, *argv: str | bytes, **env: str
) -> subprocess.CompletedProcess[bytes]:
    """`typed` None: stdin is closed."""
    return subprocess.run(
        [sys.executable, "-m", "sluice_cli", "chat", "--url", gateway.url, *argv],
        input=typed,
        stdin=subprocess.DEVNULL if typed is None else None,
        preexec_fn=(lambda: os.close(0)) if typed is None else None,
        capture_output=True,
        env=os.environ | env,
        timeout=30,
    )


@pytest.mark.parametrize("locale", ["C.UTF-8", "C", "POSIX"])
def test_what_is_no_text_is_said_to_be_none_and_not_sent(gateway, locale, tmp_path):
    """Half a character was sent as half a surrogate pair, or ended it with a traceback."""
    (tmp_path / "system").write_bytes(NO_TEXT)
    for typed, argv in (
        (NO_TEXT + b"\n", ()),
        (b"", (NO_TEXT,)),
        (b"", ("--system", NO_TEXT, "hi")),
        (b"", ("--system", f"@{tmp_path / 'system'}", "hi")),
        (b"", ("--model", NO_TEXT, "hi")),
    ):
        told = chat_with(gateway, typed, *argv, LC_ALL=locale)
        assert told.returncode == 1
        assert b"is not UTF-8 text" in told.stderr
        assert b"Traceback" not in told.stderr
        assert told.stdout == b""
    assert gateway.asked == []


def test_on_a_pipe_the_lines_that_are_text_are_asked(gateway):
    told = chat_with(gateway, b"one\n" + NO_TEXT + b"\ntwo\n")
    assert (told.returncode, told.stdout) == (1, b"1:one\n3:two\n")
    assert told.stderr == b"sluice chat: the question is not UTF-8 text (byte 0xe9)\n"


def test_a_stdin_that_is_closed_is_said(gateway):
    told = chat_with(gateway, None)
    assert (told.returncode, told.stdout) == (1, b"")
    assert told.stderr == b"sluice chat: stdin is closed: give the question as an argument\n"
    assert chat_with(gateway, None, "hi").stdout == b"1:hi\n"


def test_an_answer_that_the_terminal_cannot_show_ends_nothing(gateway):
    told = chat_with(gateway, "ü\n".encode(), PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert b"Traceback" not in told.stderr
    told = chat_with(gateway, None, "ü", PYTHONIOENCODING="ascii")
    assert (told.returncode, told.stdout, told.stderr) == (0, b"1:\\xfc\n", b"")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--api-key", "ключ"), b"the API key has a character that no header can have"),
        (("--api-key", "a\nb"), b"the API key has a character that no header can have"),
        (("--url", "http://[x"), b"is no http://HOST:PORT address"),
        (("--url", "http://x:99999"), b"is no http://HOST:PORT address"),
        (("--url", "http://" + "x" * 70 + ".org:1"), b"is no http://HOST:PORT address"),
        (("--url", "http://a b:1"), b"is no http://HOST:PORT address"),
    ],
)
def test_options_that_cannot_be_are_said(gateway, argv, words):
    told = chat_with(gateway, b"", *argv, "hi")
    assert told.returncode == 1
    assert words in told.stderr
    assert b"Traceback" not in told.stderr


def test_a_stream_is_given_as_it_comes(gateway):
    chunks = stream_chat(gateway.url, "tiny", [{"role": "user", "content": "break"}])
    assert next(chunks)["choices"][0]["delta"]["content"] == "1:"
    with pytest.raises(GatewayError):
        list(chunks)
