"""A small streaming client of the gateway: standard library only."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit


class GatewayError(Exception):
    """The gateway answered with an error, or in the middle of a stream; the message is its own."""


def connect(url: str, timeout_s: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None:
        raise GatewayError(f"{url!r} is no http:// address")
    return http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=timeout_s)


def get_json(url: str, path: str, *, timeout_s: float = 5.0) -> tuple[int, Any]:
    """(status, body). Raises OSError when nobody answers."""
    connection = connect(url, timeout_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"null")
    finally:
        connection.close()


def stream_chat(
    url: str,
    model: str,
    messages: list[dict[str, str]],
    *,
    max_tokens: int,
    api_key: str = "",
    timeout_s: float = 120.0,
) -> Iterator[dict[str, Any]]:
    """Chunks of `/v1/chat/completions`, greedy, with usage and the way the request took. Raises GatewayError."""
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Content-Type": "application/json", "x-sluice-route": "1"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    connection = connect(url, timeout_s)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise GatewayError(_message(response.read()))
        yield from _chunks(response)
    finally:
        connection.close()


def _chunks(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if not line.startswith(b"data: "):
            continue
        data = line[len(b"data: ") :].strip()
        if data == b"[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise GatewayError(str(chunk["error"].get("message", chunk["error"])))
        yield chunk
    raise GatewayError("the stream ended before [DONE]")


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]
