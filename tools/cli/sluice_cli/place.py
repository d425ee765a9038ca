"""What one `sluice up` occupies here: a port, a private directory, and a place for evidence."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

USUAL_PORT = 8000
# A Unix socket's path has 107 bytes; the longest of ours adds this to the run directory.
LONGEST_SOCKET = len("/prefill-000/transport.sock")
UNIX_PATH_MAX = 107
LOCK = "lock"
LOOPBACK = "127.0.0.1"


class UnusableHost(ValueError):
    """An address at which nothing can listen here."""


class PortTaken(OSError):
    """Somebody else listens there."""


def usable_host(host: str) -> str:
    """The numeric address of this machine that `host` is. Raises UnusableHost."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.bind((address[0], 0))
    except (OSError, UnicodeError) as error:
        raise UnusableHost(
            f"--host {host}: {getattr(error, 'strerror', None) or error}; give an address of this machine, such as"
            " 127.0.0.1 or 0.0.0.0"
        ) from error
    return str(address[0])


@contextlib.contextmanager
def reserved_port(port: int, host: str = LOOPBACK) -> Iterator[int]:
    """A port of `host` that stays ours while the block runs, also while the gateway that listens there is started
    again. 0: the usual one, or a free one where that is taken. Raises PortTaken."""
    try:
        held, taken = _reserve(port or USUAL_PORT, host)
    except (OSError, OverflowError) as error:
        if port:
            why = getattr(error, "strerror", None) or str(error)
            raise PortTaken(f"--port {port}: {why}; give another, or leave it out for a free one") from error
        held, taken = _reserve(0, host)
    with held:
        yield taken


def _reserve(port: int, host: str) -> tuple[contextlib.ExitStack, int]:
    """Two things: the port, bound with SO_REUSEADDR and never listening, which lets the gateway bind beside it and
    keeps the system from giving it to others; and, since another `sluice up` could bind beside it as well, a name that
    only one socket can have and that is gone with its process."""
    with contextlib.ExitStack() as held:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        taken = int(sock.getsockname()[1])
        name = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        name.bind(f"\0sluice-port-{taken}")
        return held.pop_all(), taken


@contextlib.contextmanager
def run_directory() -> Iterator[Path]:
    """Private to this user, gone afterwards, and short enough for the sockets in it. Those of killed ones go first."""
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) + len("/sluice-12345678") + LONGEST_SOCKET > UNIX_PATH_MAX:
        base = "/tmp"
    _sweep(Path(base))
    directory = Path(tempfile.mkdtemp(prefix="sluice-", dir=base))
    try:
        with (directory / "lock.new").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            Path(lock.name).rename(directory / LOCK)  # where it can be seen, it is held
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _sweep(base: Path) -> None:
    """Remove this user's run directories whose `sluice up` was killed: their lock is free. There is a key in them."""
    for directory in base.glob("sluice-????????"):
        with contextlib.suppress(OSError):
            told = directory.lstat()
            if not stat.S_ISDIR(told.st_mode) or told.st_uid != os.getuid():
                continue
            with os.fdopen(os.open(directory / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)


def state_directory() -> Path:
    """Of this user: what outlives a `sluice up`."""
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home) / "sluice"


@contextlib.contextmanager
def evidence_directory() -> Iterator[Path]:
    """A private folder below the state directory, no other `sluice up`'s meanwhile. It outlives this one, and the next
    finds it again: there are as many as ran at the same time. Raises OSError where none can be made."""
    base = state_directory()
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    for number in itertools.count(1):
        directory = base / ("evidence" if number == 1 else f"evidence-{number}")
        directory.mkdir(mode=0o700, exist_ok=True)
        with (directory / LOCK).open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield directory
            return
