"""The sample question of a model: the README's for the default one, a plain one for any other."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from sluice_cli.http import GatewayError, stream_chat

PLAIN = "Hello! What can you do?"


def messages(model: Path | None) -> list[dict[str, str]]:
    """From `sample.json` beside the weights."""
    path = None if model is None else model / "sample.json"
    if path is None or not path.exists():
        return [{"role": "user", "content": PLAIN}]
    return [{"role": str(m["role"]), "content": str(m["content"])} for m in json.loads(path.read_text())["messages"]]


def question(model: Path | None) -> tuple[str, str]:
    """(user's question, system text)."""
    told = messages(model)
    system = " ".join(m["content"] for m in told if m["role"] == "system")
    return told[-1]["content"], system


def curl(url: str, name: str, system: str, asked: str) -> str:
    """Ready to paste into a shell."""
    told = ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": asked}]
    body = json.dumps({"model": name, "temperature": 0, "stream": True, "messages": told}, ensure_ascii=False)
    quoted = body.replace("'", "'\\''")
    return f"curl -sN {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{quoted}'"


def ask(url: str, name: str, model: Path | None, started: float) -> None:
    """Ask it, print the answer as it streams and the way it took."""
    told = messages(model)
    print(f"you:    {told[-1]['content']}\n{name}: ", end="", flush=True)
    asked, first, last = time.monotonic(), 0.0, {}
    try:
        for chunk in stream_chat(url, name, told, max_tokens=64):
            last = chunk
            for choice in chunk.get("choices", ()):
                piece = choice["delta"].get("content") or ""
                first = first or (time.monotonic() if piece else 0.0)
                print(piece, end="", flush=True)
    except (OSError, GatewayError) as error:
        print(f"\nthe sample question failed: {error}", file=sys.stderr, flush=True)
        return
    usage, way = last.get("usage") or {}, last.get("sluice") or {}
    print(
        f"\n        {usage.get('prompt_tokens')} tokens in {way.get('chunks')} prefill chunks by pid"
        f" {way.get('prefill_pid')} -> {way.get('records')} records, {way.get('bytes')} bytes pulled over"
        f" {way.get('transport') or 'nothing (unified)'} -> {usage.get('completion_tokens')} tokens, decode pid"
        f" {way.get('decode_pid')}\n        first token after {first - asked:.3f} s,"
        f" {first - started:.1f} s after the start",
        flush=True,
    )
