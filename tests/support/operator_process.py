"""An operator as a process of its own, against a control plane of the tests."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Self

from control_plane import ControlPlane

FLEET = Path(__file__).parent / "kwok_fleet.py"
READY_S, ENDING_S = 60.0, 30.0
# A leader that stops is replaced within seconds; deadline + call < duration holds.
FAST_LEASE = (
    "--lease-duration-s=8",
    "--lease-deadline-s=4",
    "--lease-period-s=0.5",
    "--lease-call-s=3",
)


class OperatorProcess:
    """Serves `namespace` alone. Ended with SIGKILL when left, unless it has ended before. Its user in the audit log is
    `user`."""

    def __init__(
        self, plane: ControlPlane, user: str, namespace: str, *options: str, url: str = "", is_admin: bool = True
    ) -> None:
        self.user = user
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
            *FAST_LEASE,
            *options,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(ENDING_S)

    def start(self) -> None:
        launch = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); os.execv(sys.argv[1], sys.argv[1:])"
        program = [sys.executable, str(FLEET), *self._arguments]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-IS", "-c", launch, *program], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL, and wait."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(ENDING_S)

    def stop(self) -> int:
        """SIGTERM, and its exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(ENDING_S)

    def wait(self, timeout_s: float = ENDING_S) -> int:
        """Until it ends by itself."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def status(self) -> dict[str, object]:
        """What its own /status says; {} while it does not answer."""
        marks = [line.rsplit(" ", 1)[1] for line in self.text().splitlines() if "probes on port " in line]
        if not marks:
            return {}
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{marks[-1]}/status", timeout=5) as answer:
                told: dict[str, object] = json.load(answer)
                return told
        except OSError:
            return {}

    def wait_for(self, state: str, timeout_s: float = READY_S) -> None:
        deadline = time.monotonic() + timeout_s
        while self.status().get("state") != state:
            assert self._process is not None
            assert self._process.poll() is None, f"ended: {self.text()[-3000:]}"
            assert time.monotonic() < deadline, f"not {state}: {self.status()} {self.text()[-3000:]}"
            time.sleep(0.05)

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""
