"""What a kubelet does: asks every service's /livez, and after enough failures in a row ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass

from sluice_harness.client import NoAnswer, get


@dataclass(frozen=True, slots=True)
class Probing:
    """Seconds, and failures in a row. Kubernetes' numbers of ours are 10, 2 and 3."""

    period_s: float = 1.0
    timeout_s: float = 2.0
    failures: int = 3

    @property
    def budget_s(self) -> float:
        return self.failures * (self.period_s + self.timeout_s)


@dataclass(slots=True)
class _Target:
    name: str
    url: str
    pid: int
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Kill:
    name: str
    pid: int
    at: float
    why: str


class Prober:
    """One thread for all services. `kills` is what it did; its owner's business is to start them again."""

    def __init__(self, probing: Probing) -> None:
        self.probing = probing
        self.kills: list[Kill] = []
        self._targets: dict[str, _Target] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prober", daemon=True)
        self._thread.start()

    def watch(self, name: str, url: str, pid: int) -> None:
        with self._lock:
            self._targets[name] = _Target(name, url, pid)

    def forget(self, name: str) -> None:
        with self._lock:
            self._targets.pop(name, None)

    def close(self) -> None:
        self._over.set()
        self._thread.join(30)

    def _run(self) -> None:
        while not self._over.wait(self.probing.period_s):
            with self._lock:
                targets = list(self._targets.values())
            for target in targets:
                self._probe(target)

    def _probe(self, target: _Target) -> None:
        try:
            status, told = get(target.url, "/livez", self.probing.timeout_s)
            why = "" if status == 200 else f"/livez: {status}: {told}"
        except NoAnswer as error:
            why = str(error)
        target.failed = target.failed + 1 if why else 0
        if target.failed < self.probing.failures:
            return
        with self._lock:  # it may have been forgotten meanwhile, and its pid be another's
            if self._targets.get(target.name) is not target:
                return
            del self._targets[target.name]
            self.kills.append(Kill(target.name, target.pid, time.monotonic(), why))
            with contextlib.suppress(ProcessLookupError):
                os.kill(target.pid, signal.SIGKILL)
