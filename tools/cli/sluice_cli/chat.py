"""Talk to a running `sluice up` from the terminal: what you type goes out, the answer streams in. An empty line or
Ctrl-D ends it, Ctrl-C cuts an answer short, /new forgets the conversation. On a pipe every line is a question."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path

from sluice_cli.http import GatewayError, get_models, stream_chat
from sluice_cli.notes import read_note


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("message", nargs="*", help="ask this and exit")
    parser.add_argument("--url", default="", help="of the gateway; default: the `sluice up` that runs here")
    parser.add_argument("--model", default="", help="default: the first that the gateway serves")
    parser.add_argument("--system", default="", help="system message, or @FILE")
    parser.add_argument("--max-tokens", type=int, default=0, help="of an answer; default: as many as fit")
    parser.add_argument("--api-key", default="", help="one of the gateway's --api-keys-file")


def run(args: argparse.Namespace) -> int:
    try:
        beginning = _system(args.system)
        model = text_of("--model", args.model)
        if not args.message and sys.stdin is None:
            raise NotText("stdin is closed: give the question as an argument")
    except (OSError, NotText) as error:
        print(f"sluice chat: {error}", file=sys.stderr)
        return 1
    try:
        url = args.url or read_note()
        models = get_models(url, args.api_key)
    except (OSError, GatewayError) as error:
        print(f"sluice chat: {error}. Start a gateway with `sluice up`, or give --url.", file=sys.stderr)
        return 1
    talk = Conversation(url, model or models[0], beginning, args.max_tokens, args.api_key)
    if args.message:
        return 0 if talk.ask(" ".join(args.message)) else 1
    return _converse(talk)


class NotText(Exception):
    """What was said cannot be sent; the message names it."""


def text_of(name: str, said: str) -> str:
    """`said`, which came from outside: what was no UTF-8 there stands in it as halves of surrogate pairs. Raises
    NotText."""
    try:
        said.encode()
    except UnicodeEncodeError as error:
        half = ord(said[error.start])
        what = f"byte 0x{half - 0xDC00:02x}" if 0xDC80 <= half <= 0xDCFF else f"U+{half:04X}"
        raise NotText(f"{name} is not UTF-8 text ({what})") from error
    return said


class Conversation:
    """`messages` holds questions with their answers; one that failed is taken back."""

    def __init__(self, url: str, model: str, beginning: list[dict[str, str]], max_tokens: int, api_key: str) -> None:
        self.url, self.model = url, model
        self.messages = list(beginning)
        self._beginning = beginning
        self._max_tokens, self._api_key = max_tokens, api_key

    def forget(self) -> None:
        self.messages = list(self._beginning)

    def ask(self, line: str) -> bool:
        """Prints the answer as it streams. Whether it came to its end."""
        answer, finish = "", ""
        try:
            asked = [*self.messages, {"role": "user", "content": text_of("the question", line)}]
            for chunk in stream_chat(self.url, self.model, asked, max_tokens=self._max_tokens, api_key=self._api_key):
                for choice in chunk.get("choices", ()):
                    piece = choice["delta"].get("content") or ""
                    answer, finish = answer + piece, choice.get("finish_reason") or finish
                    print(piece, end="", flush=True)
        except (OSError, GatewayError, NotText) as error:
            if answer:
                print(flush=True)
            print(f"sluice chat: {error}", file=sys.stderr, flush=True)
            return False
        print(flush=True)
        if finish == "length":
            print("(cut: no more tokens allowed, or the context is full)", file=sys.stderr, flush=True)
        self.messages = [*asked, {"role": "assistant", "content": answer}]
        return True


def _system(text: str) -> list[dict[str, str]]:
    """Raises OSError when @FILE cannot be read, NotText."""
    if text.startswith("@"):
        read = Path(text[1:]).read_text(encoding="utf-8", errors="surrogateescape").strip()
        text = text_of(f"--system {text}", read)
    return [{"role": "system", "content": text_of("--system", text)}] if text else []


def _converse(talk: Conversation) -> int:
    """On a terminal a failure is said and the talk goes on; on a pipe the status is 1 at the end."""
    is_terminal = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line that is no text ends itself only
    if is_terminal:
        print(f"{talk.model} at {talk.url}. An empty line ends it, /new forgets the conversation.")
    all_well = True
    for line in _typed() if is_terminal else sys.stdin:
        text = line.strip()
        if not text:
            break
        if text == "/new":
            talk.forget()
            continue
        try:
            all_well = talk.ask(text) and all_well
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print(" (cut)")
    return 0 if all_well or is_terminal else 1


def _typed() -> Iterator[str]:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
