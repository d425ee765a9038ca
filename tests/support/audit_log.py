"""What the API server was asked, by whom, and how it answered."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any


def policy(unheard: str) -> dict[str, Any]:
    """What changed nothing is of interest only by number: metadata will do. `unheard`: a user who is not written of."""
    rules: list[dict[str, Any]] = [
        {"level": "None", "nonResourceURLs": ["/readyz*", "/healthz*", "/livez*"]},
        {"level": "None", "users": [unheard, "system:apiserver"]},
        {"level": "None", "userGroups": ["system:serviceaccounts"]},
        {"level": "Metadata"},
    ]
    return {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"], "rules": rules}


@dataclass(frozen=True, slots=True)
class Request:
    """A line of the audit log: who asked for what, from `began` to `at`, and how it was answered."""

    user: str
    agent: str
    verb: str
    resource: str
    namespace: str
    name: str
    code: int
    began: float
    at: float

    @property
    def writes(self) -> bool:
        return self.verb not in ("get", "list", "watch")


def most_at_once(requests: Iterable[Request]) -> int:
    """How many of them the API server had at one time."""
    steps = sorted((moment, change) for r in requests for moment, change in ((r.began, 1), (r.at, -1)))
    return max(itertools.accumulate(change for _, change in steps), default=0)


class AuditLog:
    """Grows all the time, and is asked again and again: each line is read once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._read: list[Request] = []

    def requests(self) -> Sequence[Request]:
        if self._path.exists():
            with self._path.open("rb") as log:
                log.seek(self._offset)
                for line in log:
                    if not line.endswith(b"\n"):
                        break  # is being written
                    self._offset += len(line)
                    self._read.append(_request(json.loads(line)))
        return tuple(self._read)


def _request(line: dict[str, Any]) -> Request:
    about = line.get("objectRef", {})
    resource = "/".join(part for part in (about.get("resource", ""), about.get("subresource", "")) if part)
    return Request(
        user=line["user"].get("username", ""),
        agent=line.get("userAgent", ""),
        verb=line["verb"],
        resource=resource,
        namespace=about.get("namespace", ""),
        name=about.get("name", ""),
        code=line.get("responseStatus", {}).get("code", 0),
        began=seconds(line["requestReceivedTimestamp"]),
        at=seconds(line["stageTimestamp"]),
    )


def seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
