"""Talk to a running `sluice up` from the terminal: what you type goes out, the answer streams in. An empty line or
Ctrl-D ends it; /new forgets the conversation."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from sluice_cli.http import GatewayError, get_json, stream_chat
from sluice_cli.up import state_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("message", nargs="*", help="ask this and exit")
    parser.add_argument("--url", default="", help="of the gateway; default: the `sluice up` that runs here")
    parser.add_argument("--system", default="", help="system message, or @FILE")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--api-key", default="")


def run(args: argparse.Namespace) -> int:
    try:
        url = args.url or find_running()
        _, models = get_json(url, "/v1/models")
        model = models["data"][0]["id"]
    except (OSError, GatewayError, KeyError, IndexError, ValueError) as error:
        print(f"sluice chat: no gateway: {error}. Start one with `sluice up`, or give --url.", file=sys.stderr)
        return 1
    messages: list[dict[str, str]] = []
    if args.system:
        text = args.system
        if text.startswith("@"):
            text = Path(text[1:]).read_text(encoding="utf-8")
        messages.append({"role": "system", "content": text})
    if args.message:
        return _ask(url, model, messages, " ".join(args.message), args)
    return _converse(url, model, messages, args)


def find_running() -> str:
    """Raises OSError when no `sluice up` of this user runs here."""
    return str(json.loads(state_file().read_text())["url"])


def _converse(url: str, model: str, messages: list[dict[str, str]], args: argparse.Namespace) -> int:
    print(f"{model} at {url}. An empty line ends it, /new forgets the conversation.")
    beginning = list(messages)
    while True:
        try:
            line = input("> ")
        except EOFError:
            return 0
        if not line.strip():
            return 0
        if line.strip() == "/new":
            messages = list(beginning)
        else:
            _ask(url, model, messages, line, args)


def _ask(url: str, model: str, messages: list[dict[str, str]], line: str, args: argparse.Namespace) -> int:
    """Adds question and answer to `messages`; a failed question is taken back."""
    messages.append({"role": "user", "content": line})
    answer = ""
    try:
        for chunk in stream_chat(url, model, messages, max_tokens=args.max_tokens, api_key=args.api_key):
            for choice in chunk.get("choices", ()):
                piece = choice["delta"].get("content") or ""
                answer += piece
                print(piece, end="", flush=True)
        print()
    except (OSError, GatewayError) as error:
        messages.pop()
        print(f"\nsluice chat: {error}", file=sys.stderr)
        return 1
    messages.append({"role": "assistant", "content": answer})
    return 0
