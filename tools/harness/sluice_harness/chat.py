"""One streamed chat of a client, read by a thread of its own so that many can be under way."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from http.client import HTTPConnection, HTTPException
from itertools import pairwise
from urllib.parse import urlsplit

TIMEOUT_S = 180.0


class Chat:
    """Greedy. `pieces`: (monotonic seconds, text). `error`: why it is over early; "" when it was answered."""

    def __init__(self, url: str, text: str, max_tokens: int, model: str = "m") -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self.began = time.monotonic()
        self.pieces: list[tuple[float, str]] = []
        self.error = ""
        self.finish = ""
        self.max_tokens = max_tokens
        self.over = threading.Event()
        self._dropped = False
        self._connection = HTTPConnection(parts.hostname, parts.port, timeout=TIMEOUT_S)
        self._body = json.dumps(
            {
                "model": model,
                "messages": [{"role": "user", "content": text}],
                "max_tokens": max_tokens,
                "temperature": 0,
                "stream": True,
            }
        )
        self._thread = threading.Thread(target=self._run, name="chat", daemon=True)
        self._thread.start()

    @property
    def text(self) -> str:
        return "".join(piece for _, piece in self.pieces)

    @property
    def is_answered(self) -> bool:
        return self.over.is_set() and not self.error and self.finish in ("length", "stop")

    @property
    def longest_pause_s(self) -> float:
        """Between two pieces."""
        times = [at for at, _ in self.pieces]
        return max((b - a for a, b in pairwise(times)), default=0.0)

    def wait(self, timeout_s: float = TIMEOUT_S) -> bool:
        return self.over.wait(timeout_s)

    def drop(self) -> None:
        """As a client does that goes away."""
        self._dropped = True
        if self._connection.sock is not None:
            with contextlib.suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        try:
            self._connection.request("POST", "/v1/chat/completions", self._body, {"Content-Type": "application/json"})
            self._read()
        except (OSError, HTTPException, ValueError) as error:
            self.error = self.error or f"{type(error).__name__}: {error}"
        finally:
            self._connection.close()
            if not self.finish and not self.error:
                self.error = "it ended without a last word"
            self.over.set()

    def _read(self) -> None:
        response = self._connection.getresponse()
        if response.status != 200:
            self.error = f"{response.status}: {response.read()[:300]!r}"
            return
        for line in response:
            if not line.startswith(b"data: "):  # an empty line, or a comment that only keeps the connection alive
                continue
            data = line.removeprefix(b"data: ").strip()
            if not data or data == b"[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                self.error = str(chunk["error"])
                return
            for choice in chunk["choices"]:
                self.finish = choice.get("finish_reason") or self.finish
                if content := choice["delta"].get("content"):
                    self.pieces.append((time.monotonic(), content))
