"""`sluice up` as a process, and a check that nothing of it is left behind."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
SLUICE = (sys.executable, "-m", "sluice_cli")
LIMIT_S = 60.0
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # run in the background of a script; children inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _wait(check: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
    deadline = time.monotonic() + limit_s
    while not (value := check()):
        assert time.monotonic() < deadline, f"{what}: not within {limit_s} s"
        time.sleep(0.02)
    return value


class Up:
    """One `sluice up`. `home`: all that it may leave things in. `lines`: what it has printed on a pipe or a `terminal`,
    both streams together."""

    def __init__(self, *argv: str, env: dict[str, str] | None = None, terminal: bool = False) -> None:
        self.home = tempfile.TemporaryDirectory(prefix="up-")
        self.state = tempfile.TemporaryDirectory(prefix="up-state-")  # evidence may stay there
        places = {"TMPDIR": self.home.name, "XDG_RUNTIME_DIR": self.home.name, "XDG_STATE_HOME": self.state.name}
        self.env = os.environ | places | (env or {})
        self.lines: list[str] = []
        self.pids: set[int] = set()
        self.hangs_up = False  # read no more and close it, as `| head` and a lost terminal do
        ends = pty.openpty() if terminal else os.pipe()
        self._ends = list(ends) if terminal else ends[:1]
        told = ends[1]
        self.process = subprocess.Popen(
            [*SLUICE, "up", *argv],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=told,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        if not terminal:
            os.close(told)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        rest = b""
        while not self.hangs_up:
            try:
                ready, _, _ = select.select(self._ends[:1], [], [], 0.05)
                part = os.read(self._ends[0], 65536) if ready else None
            except OSError:  # the other end of a terminal
                part = b""
            if part == b"":
                break
            *lines, rest = (rest + (part or b"")).split(b"\n")
            self.lines += [line.decode(errors="replace").rstrip("\r") for line in lines]
        for end in self._ends:
            os.close(end)
        self._ends = []

    def stop_reading(self) -> None:
        """Ctrl-S: whoever writes to the terminal waits."""
        termios.tcflow(self._ends[1], termios.TCOOFF)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def url(self) -> str:
        return self.wait(r"ready: (http://[0-9.:]+)/v1")[1]

    def wait(self, pattern: str, *, start: int = 0, limit_s: float = LIMIT_S) -> re.Match[str]:
        """The first match in a line from number `start` on."""

        def find() -> re.Match[str] | None:
            self.note_pids()
            for line in self.lines[start:]:
                if found := re.search(pattern, line):
                    return found
            assert self.process.poll() is None or self._reader.is_alive(), f"it ended: {self.text}"
            return None

        try:
            found: re.Match[str] = _wait(find, pattern, limit_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text}") from error
        return found

    def note_pids(self) -> None:
        try:
            root = psutil.Process(self.process.pid)
            self.pids |= {root.pid, *(child.pid for child in root.children(recursive=True))}
        except psutil.NoSuchProcess:
            pass

    def service(self, word: str) -> int:
        """pid of the direct child that has `word` in its command line."""
        found = [p.pid for p in psutil.Process(self.process.pid).children() if word in " ".join(p.cmdline())]
        assert len(found) == 1, (word, found)
        return found[0]

    def kill(self, word: str) -> int:
        """SIGKILL a service; the number of lines printed before."""
        self.note_pids()
        count = len(self.lines)
        os.kill(self.service(word), signal.SIGKILL)
        return count

    def interrupt(self) -> int:
        """Ctrl-C: the exit status."""
        self.note_pids()
        self.process.send_signal(signal.SIGINT)
        return self.end()

    def end(self) -> int:
        """Exit status, after a check that no process, socket or folder is left."""
        try:
            status = self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end:\n{self.text}") from None
        if len(self._ends) > 1:
            self.hangs_up = True  # nobody ends a terminal of ours but we
        self._reader.join(10)
        try:
            _wait(lambda: not self.left_behind(), f"nothing of {self.pids} is left", 10)
        except AssertionError as error:
            living = [" ".join(psutil.Process(pid).cmdline()) for pid in self.left_behind()]
            raise AssertionError(f"{error}: {living}") from error
        left = [path.name for path in Path(self.home.name).iterdir()]
        assert left == [], left
        return status

    def left_behind(self) -> list[int]:
        return [pid for pid in self.pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]

    def dispose(self) -> None:
        """Whatever a test did: nothing of ours survives it."""
        self.note_pids()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        self.hangs_up = True
        self._reader.join(10)
        for pid in self.left_behind():
            os.kill(pid, signal.SIGKILL)
        self.home.cleanup()
        self.state.cleanup()

    def sluice(self, *argv: str, typed: str = "") -> subprocess.CompletedProcess[str]:
        """Another `sluice` command of the same user."""
        return subprocess.run(
            [*SLUICE, *argv], env=self.env, input=typed, capture_output=True, text=True, timeout=LIMIT_S
        )


def _begin_and_dispose() -> Iterator[Callable[..., Up]]:
    begun: list[Up] = []

    def begin(*argv: str, env: dict[str, str] | None = None, terminal: bool = False) -> Up:
        begun.append(Up(*argv, env=env, terminal=terminal))
        return begun[-1]

    yield begin
    for one in begun:
        one.dispose()


@pytest.fixture
def up() -> Iterator[Callable[..., Up]]:
    """Starts `sluice up`; ends it when the test has not."""
    yield from _begin_and_dispose()


@pytest.fixture(scope="module")
def up_of_module() -> Iterator[Callable[..., Up]]:
    """The same for several tests of one file."""
    yield from _begin_and_dispose()


@pytest.fixture
def broken_nixl(tmp_path: Path) -> dict[str, str]:
    """An environment in which NIXL does not load."""
    package = tmp_path / "nixl_cu13"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libnixl.so: cannot open shared object file')\n")
    return {"PYTHONPATH": str(tmp_path)}
