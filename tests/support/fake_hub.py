"""The Hugging Face hub as far as `hf download` asks it, for one repository: a folder."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

REPOSITORY, COMMIT = "example/recall-1m", "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Serves `folder` as a private repository on all addresses, to who brings `token`; a thread until it is left."""

    repository, commit = REPOSITORY, COMMIT

    def __init__(self, folder: Path, token: str) -> None:
        self.token = token
        self.strangers: set[str] = set()  # paths that were asked for without the token
        self._paths: set[str] = set()
        hub, files = self, [file for file in sorted(folder.iterdir()) if file.is_file()]

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self._answer(with_body=False)

            def do_GET(self) -> None:
                self._answer(with_body=True)

            def _answer(self, with_body: bool) -> None:
                path = self.path.partition("?")[0]
                if self.headers.get("Authorization") != f"Bearer {token}":
                    hub.strangers.add(path)
                    self._send(401, {"X-Error-Code": "GatedRepo"}, b"{}", with_body)
                elif path == f"/api/models/{REPOSITORY}/tree/{COMMIT}":
                    self._json([_entry(file) for file in files], with_body)
                elif path.startswith(f"/api/models/{REPOSITORY}"):
                    siblings = [{"rfilename": file.name} for file in files]
                    self._json({"id": REPOSITORY, "sha": COMMIT, "private": True, "siblings": siblings}, with_body)
                elif path.startswith(f"/{REPOSITORY}/resolve/{COMMIT}/"):
                    self._file(folder / path.rpartition("/")[2], with_body)
                else:
                    self._send(404, {"X-Error-Code": "EntryNotFound"}, b"{}", with_body)

            def _json(self, told: object, with_body: bool) -> None:
                self._send(200, {"Content-Type": "application/json"}, json.dumps(told).encode(), with_body)

            def _file(self, file: Path, with_body: bool) -> None:
                data = file.read_bytes()
                if with_body:
                    hub._paths.add(file.name)
                tag = f'"{hashlib.sha256(data).hexdigest()}"'
                self._send(200, {"ETag": tag, "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}, data, with_body)

            def _send(self, status: int, headers: dict[str, str], data: bytes, with_body: bool) -> None:
                self.send_response(status)
                for name, value in (headers | {"Content-Length": str(len(data))}).items():
                    self.send_header(name, value)
                self.end_headers()
                if with_body:
                    self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("0.0.0.0", 0), Handler)
        self.port: int = self._server.server_address[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def served(self, *names: str) -> bool:
        """Whether the contents of all of them were fetched."""
        return set(names) <= self._paths

    def forget(self) -> None:
        self._paths.clear()


def _entry(file: Path) -> dict[str, object]:
    data = file.read_bytes()
    return {"type": "file", "path": file.name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
