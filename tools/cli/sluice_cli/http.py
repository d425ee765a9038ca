"""A small streaming client of the gateway: standard library only."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

TRIES, LONGEST_WAIT_S = 5, 10


class GatewayError(Exception):
    """The gateway answered with an error, or in the middle of a stream; the message is its own."""


def connect(url: str, timeout_s: float) -> http.client.HTTPConnection:
    """Host and port count; a path such as /v1 is left to us. Raises GatewayError."""
    try:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError("not HTTP")
        parts.hostname.encode("idna")
        return http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=timeout_s)
    except (ValueError, http.client.HTTPException) as error:
        raise GatewayError(f"{url!r} is no http://HOST:PORT address") from error


def get_json(url: str, path: str, *, api_key: str = "", timeout_s: float = 5.0) -> tuple[int, Any]:
    """(status, body). Raises OSError when nobody answers, ValueError when it is not JSON."""
    connection = connect(url, timeout_s)
    try:
        connection.request("GET", path, headers=_auth(api_key))
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"null")
    except http.client.HTTPException as error:
        raise OSError(f"{url} does not speak HTTP: {error!r}") from error
    finally:
        connection.close()


def get_models(url: str, api_key: str = "") -> list[str]:
    """What the gateway serves. Raises OSError or GatewayError."""
    try:
        status, body = get_json(url, "/v1/models", api_key=api_key)
        if status != 200:
            raise GatewayError(str(body["error"]["message"]))
        return [str(model["id"]) for model in body["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise GatewayError(f"{url} is no gateway of Sluice: {error!r}") from error


def stream_chat(
    url: str,
    model: str,
    messages: list[dict[str, str]],
    *,
    max_tokens: int = 0,
    api_key: str = "",
    timeout_s: float = 120.0,
) -> Iterator[dict[str, Any]]:
    """Chunks of `/v1/chat/completions`, greedy, with usage and the way the request took. `max_tokens` 0: as many as
    fit. Raises OSError or GatewayError."""
    body: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if max_tokens:
        body["max_tokens"] = max_tokens
    headers = {"Content-Type": "application/json", "x-sluice-route": "1", **_auth(api_key)}
    try:
        connection, response = _post(url, json.dumps(body), headers, timeout_s)
        with contextlib.closing(connection):
            yield from _chunks(response)
    except http.client.HTTPException as error:
        raise GatewayError(f"the connection broke: {error!r}") from error


def _post(
    url: str, body: str, headers: dict[str, str], timeout_s: float
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """The answer with status 200. Waits as the gateway asks to when it is busy or its engines are being started."""
    for tries_left in reversed(range(TRIES)):
        connection = connect(url, timeout_s)
        with contextlib.ExitStack() as unless_answered:
            unless_answered.callback(connection.close)
            connection.request("POST", "/v1/chat/completions", body, headers)
            response = connection.getresponse()
            if response.status == 200:
                unless_answered.pop_all()
                return connection, response
            problem, wait = _message(response.read()), response.headers.get("Retry-After", "")
        if response.status not in (429, 503) or not wait.isdigit() or not tries_left:
            break
        time.sleep(min(int(wait), LONGEST_WAIT_S))
    raise GatewayError(problem)


def _auth(api_key: str) -> dict[str, str]:
    """Raises GatewayError."""
    if not api_key:
        return {}
    if not api_key.isprintable() or any(ord(char) > 0xFF for char in api_key):
        raise GatewayError("the API key has a character that no header can have")
    return {"Authorization": f"Bearer {api_key}"}


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
