"""An operator as a process of its own, against a control plane of the tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self

from control_plane import ControlPlane
from operator_forge import Forge

FLEET = Path(__file__).parent / "kwok_fleet.py"
FORGE = Forge()
POLL_S = 0.01
READY_S, ENDING_S = 120.0, 60.0
# Of its log, where a test fails; and how long it may take to say where it is.
MOST_SAID, SAY_S = 24_000, 1.0
# Of a leader that is not to lose its lease, however busy the machine is.
PATIENT_LEASE = ("--lease-duration-s=300", "--lease-deadline-s=200", "--lease-call-s=20")
# A leader that stops is replaced within seconds; deadline + call < duration holds.
FAST_LEASE = (
    "--lease-duration-s=8",
    "--lease-deadline-s=4",
    "--lease-period-s=0.5",
    "--lease-call-s=3",
)


class Forked:
    """As a Popen, of a process that the forge has made. It stays a zombie until it is asked for, so its pid is its."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            self._status = FORGE.poll(self.pid)
        return self._status

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} has not ended after {timeout} s")
            time.sleep(POLL_S)
        return status


class OperatorProcess:
    """Serves `namespace` alone. Ended with SIGKILL when left, unless it has ended before. Its user in the audit log is
    `user`. `is_forked` False: a program of its own, for one whose memory is measured."""

    def __init__(
        self,
        plane: ControlPlane,
        user: str,
        namespace: str,
        *options: str,
        url: str = "",
        is_admin: bool = True,
        is_forked: bool = True,
    ) -> None:
        self.user, self.is_forked = user, is_forked
        self.log = plane.folder / f"operator-{user}.log"
        kubeconfig = plane.user_kubeconfig(user, url)
        if is_admin:
            plane.allow_everything(user)
        self._arguments = [
            f"--kubeconfig={kubeconfig}",
            "--control-image=registry.local/sluice-control:1",
            "--probe-host=127.0.0.1",
            f"--namespace={namespace}",
            f"--lease-namespace={namespace}",
            *PATIENT_LEASE,
            f"--drained={plane.folder / f'drained-{user}'}",
            *options,
        ]
        self._process: Forked | subprocess.Popen[bytes] | None = None

    living: ClassVar[set[OperatorProcess]] = set()

    def __enter__(self) -> Self:
        self.start()
        self.living.add(self)
        return self

    def __exit__(self, *exc: object) -> None:
        self.living.discard(self)
        if self._process is not None and self._process.poll() is None:
            self.kill()
        print(f"{self.user} said last:\n{self.text()[-MOST_SAID:]}")  # shown where the test fails

    def say_where(self) -> None:
        """Into its log: what its /status says, and where its threads and tasks are."""
        told = self.status()
        with self.log.open("a") as log:
            log.write(f"its status: {told or 'no answer'}\n")
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(SAY_S)

    def start(self) -> None:
        if self.is_forked:
            self._process = Forked(FORGE.start(self._arguments, self.log))
            return
        launch = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); os.execv(sys.argv[1], sys.argv[1:])"
        program = [sys.executable, str(FLEET), *self._arguments]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-IS", "-c", launch, *program], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    @property
    def process(self) -> Forked | subprocess.Popen[bytes]:
        assert self._process is not None, "started"
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(ENDING_S)

    def stop(self) -> int:
        """SIGTERM, and its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(ENDING_S)

    def wait(self, timeout_s: float = ENDING_S) -> int:
        """Until it ends by itself."""
        return self.process.wait(timeout_s)

    def status(self) -> dict[str, Any]:
        """What its own /status says; {} while it does not answer."""
        marks = [line.rsplit(" ", 1)[1] for line in self.text().splitlines() if "probes on port " in line]
        if not marks:
            return {}
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{marks[-1]}/status", timeout=5) as answer:
                told: dict[str, Any] = json.load(answer)
                return told
        except OSError:
            return {}

    def until(self, is_so: Callable[[dict[str, Any]], bool], timeout_s: float = READY_S) -> None:
        """Its own /status is so."""
        deadline = time.monotonic() + timeout_s
        while not ((told := self.status()) and is_so(told)):
            assert time.monotonic() < deadline, f"stayed {told}"
            time.sleep(0.05)

    def wait_for(self, state: str, timeout_s: float = READY_S) -> None:
        deadline = time.monotonic() + timeout_s
        while self.status().get("state") != state:
            assert self.process.poll() is None, f"ended: {self.text()[-3000:]}"
            assert time.monotonic() < deadline, f"not {state}: {self.status()} {self.text()[-3000:]}"
            time.sleep(0.05)

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""
