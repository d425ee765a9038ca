"""The sample question of a model: the README's for the default one, a plain one for any other."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sluice_cli.http import GatewayError, stream_chat

PLAIN = "Hello! What can you do?"


def messages(model: Path | None) -> list[dict[str, str]]:
    """From `sample.json` beside the weights; the plain question where there is none that can be asked."""
    with contextlib.suppress(OSError, ValueError):
        if model is not None:
            return _read(model / "sample.json")
    return [{"role": "user", "content": PLAIN}]


def problem(model: Path | None) -> str:
    """Why the model's own question is not asked; empty where it is, and where there is none. No serving depends on it:
    the name is nobody's, and the file may be another program's."""
    if model is None or not (model / "sample.json").exists():
        return ""
    try:
        _read(model / "sample.json")
    except (OSError, ValueError) as error:
        return f"{model / 'sample.json'} is not asked: {error}"
    return ""


def _read(path: Path) -> list[dict[str, str]]:
    """Raises OSError, ValueError."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        read = [{"role": _text(m["role"]), "content": _text(m["content"])} for m in told["messages"]]
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError('it has no "messages" with "role" and "content" in each') from error
    if not read or read[-1]["role"] != "user":
        raise ValueError('the last of its "messages" is not the user\'s')
    return read


def _text(value: object) -> str:
    """Raises TypeError, ValueError."""
    if not isinstance(value, str):
        raise TypeError
    value.encode()
    return value


def question(model: Path | None) -> tuple[str, str]:
    """(user's question, system text)."""
    told = messages(model)
    system = " ".join(m["content"] for m in told if m["role"] == "system")
    return told[-1]["content"], system


def curl(url: str, name: str, system: str, asked: str, needs_key: bool = False) -> str:
    """Ready to paste into a shell."""
    told = ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": asked}]
    body = json.dumps({"model": name, "temperature": 0, "stream": True, "messages": told}, ensure_ascii=False)
    quoted = body.replace("'", "'\\''")
    key = ' -H "Authorization: Bearer $API_KEY"' if needs_key else ""
    return f"curl -sN {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{quoted}'"


def ask(url: str, name: str, model: Path | None, started: float, api_key: str, is_over: Callable[[], bool]) -> None:
    """Ask it, print the answer as it streams and the way it took. Silent about a failure once `is_over`."""
    told = messages(model)
    print(f"you:    {told[-1]['content']}\n{name}: ", end="", flush=True)
    asked, first, last = time.monotonic(), 0.0, {}
    try:
        for chunk in stream_chat(url, name, told, max_tokens=64, api_key=api_key):
            last = chunk
            for choice in chunk.get("choices", ()):
                piece = choice["delta"].get("content") or ""
                first = first or (time.monotonic() if piece else 0.0)
                print(piece, end="", flush=True)
    except (OSError, GatewayError) as error:
        if not is_over():
            print(f"\nthe sample question failed: {error}", file=sys.stderr, flush=True)
        return
    usage, way = last.get("usage") or {}, last.get("sluice") or {}
    print()
    for line in _way(usage, way):
        print(f"        {line}")
    print(f"        first token after {first - asked:.2f} s, {first - started:.1f} s after the start\n", flush=True)


def _way(usage: dict[str, Any], way: dict[str, Any]) -> Iterator[str]:
    prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if not way.get("transport"):
        yield f"{prompt} tokens in, {output} tokens out, engine pid {way.get('decode_pid')}"
        return
    yield f"prefill  pid {way['prefill_pid']}: {prompt} tokens in {way.get('chunks')} chunks"
    yield f"handoff  {way.get('records')} records, {way.get('bytes'):,} bytes pulled over {way['transport']}"
    yield f"decode   pid {way.get('decode_pid')}: {output} tokens"
