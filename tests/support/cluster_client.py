"""The API server as a test sees it: plain JSON over TLS with a client certificate, every call bounded in time."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

CALL_S = 20.0
ANY = "*/*"
T = TypeVar("T")


class Refused(Exception):
    """Not a 2xx: `code`, and the API server's own message."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code, self.text = code, text


class ClusterClient:
    """One connection a call. Paths as the API has them, e.g. /api/v1/namespaces/default/pods."""

    def __init__(self, url: str, ca: Path, certificate: Path, key: Path) -> None:
        self._address = urlsplit(url).netloc
        self._tls = ssl.create_default_context(cafile=str(ca))
        self._tls.load_cert_chain(str(certificate), str(key))

    def call(self, method: str, path: str, body: Any = None, content: str = "application/json") -> Any:
        """The JSON that came back. Raises Refused, OSError."""
        return json.loads(self._call(method, path, body, content))

    def get_text(self, path: str) -> str:
        return self._call("GET", path, None, "").decode()

    def get(self, path: str) -> Any:
        return self.call("GET", path)

    def find(self, path: str, accept: str = ANY) -> Any:
        """None for what does not exist."""
        try:
            return json.loads(self._call("GET", path, None, "", accept))
        except Refused as error:
            if error.code == 404:
                return None
            raise

    def items(self, path: str) -> list[Any]:
        found: list[Any] = self.get(path)["items"]
        return found

    def create(self, path: str, body: Any) -> Any:
        return self.call("POST", path, body)

    def merge(self, path: str, body: Any) -> Any:
        return self.call("PATCH", path, body, "application/merge-patch+json")

    def delete(self, path: str) -> None:
        self.call("DELETE", path)

    def until(self, path: str, is_so: Callable[[Any], T], timeout_s: float = 60.0, accept: str = ANY) -> T:
        """Ask until `is_so` of what is there (None: nothing) is true, and return it; AssertionError with the last."""
        deadline = time.monotonic() + timeout_s
        while True:
            there = self.find(path, accept)
            if told := is_so(there):
                return told
            assert time.monotonic() < deadline, f"{path} stayed {json.dumps(there)[:3000]}"
            time.sleep(0.05)

    def _call(self, method: str, path: str, body: Any, content: str, accept: str = ANY) -> bytes:
        connection = http.client.HTTPSConnection(self._address, context=self._tls, timeout=CALL_S)
        try:
            headers = {"Accept": accept} | ({"Content-Type": content} if body is not None else {})
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            told = answer.read()
        except http.client.HTTPException as error:
            raise ConnectionError(f"{method} {path}: {error!r}") from error
        finally:
            connection.close()
        if not 200 <= answer.status < 300:
            raise Refused(answer.status, _message(told))
        return told


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")
