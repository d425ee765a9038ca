"""The API server as a test sees it: plain JSON over TLS with a client certificate, every call bounded in time."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
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


def _in_short(there: Any) -> str:
    """What says most comes first, and what says nothing is left out."""
    if not isinstance(there, dict):
        return json.dumps(there)[:4000]
    metadata = {key: value for key, value in there.get("metadata", {}).items() if key != "managedFields"}
    return json.dumps({"status": there.get("status"), **there, "metadata": metadata})[:4000]


class ClusterClient:
    """Paths as the API has them, e.g. /api/v1/namespaces/default/pods. Reads of one thread share a connection, for most
    of what a test does is to ask again; whatever changes something has its own, and is sent once."""

    def __init__(self, url: str, ca: Path, certificate: Path, key: Path) -> None:
        self._address = urlsplit(url).netloc
        self._tls = ssl.create_default_context(cafile=str(ca))
        self._tls.load_cert_chain(str(certificate), str(key))
        self._kept = threading.local()
        self._open: set[http.client.HTTPSConnection] = set()

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

    def until(
        self, path: str, is_so: Callable[[Any], T], timeout_s: float = 120.0, accept: str = ANY, every_s: float = 0.05
    ) -> T:
        """Ask until `is_so` of what is there (None: nothing) is true, and return it; AssertionError with the last."""
        deadline = time.monotonic() + timeout_s
        while True:
            there = self.find(path, accept)
            if told := is_so(there):
                return told
            assert time.monotonic() < deadline, f"{path} stayed {_in_short(there)}"
            time.sleep(every_s)

    def _call(self, method: str, path: str, body: Any, content: str, accept: str = ANY) -> bytes:
        headers = {"Accept": accept} | ({"Content-Type": content} if body is not None else {})
        data = None if body is None else json.dumps(body)
        try:
            code, told = self._read(path, headers) if method == "GET" else self._write(method, path, data, headers)
        except http.client.HTTPException as error:
            raise ConnectionError(f"{method} {path}: {error!r}") from error
        if not 200 <= code < 300:
            raise Refused(code, _message(told))
        return told

    def _write(self, method: str, path: str, data: str | None, headers: dict[str, str]) -> tuple[int, bytes]:
        connection = self._connect()
        try:
            return _exchange(connection, method, path, data, headers)
        finally:
            connection.close()

    def _read(self, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        """Once more on a fresh connection, where the kept one has been closed meanwhile."""
        kept: http.client.HTTPSConnection | None = getattr(self._kept, "connection", None)
        if kept is not None:
            try:
                return _exchange(kept, "GET", path, None, headers)
            except (OSError, http.client.HTTPException):
                self._forget(kept)
        fresh = self._kept.connection = self._connect()
        self._open.add(fresh)
        try:
            return _exchange(fresh, "GET", path, None, headers)
        except BaseException:
            self._forget(fresh)
            raise

    def _connect(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(self._address, context=self._tls, timeout=CALL_S)

    def _forget(self, connection: http.client.HTTPSConnection) -> None:
        self._kept.connection = None
        self._open.discard(connection)
        connection.close()

    def close(self) -> None:
        """Of what all threads have kept; a later call of this thread connects again."""
        self._kept.connection = None
        while self._open:
            self._open.pop().close()


def _exchange(
    connection: http.client.HTTPSConnection, method: str, path: str, data: str | None, headers: dict[str, str]
) -> tuple[int, bytes]:
    connection.request(method, path, data, headers)
    answer = connection.getresponse()
    return answer.status, answer.read()


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")
