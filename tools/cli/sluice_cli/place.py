"""What one `sluice up` occupies here: a port, a private directory, and a note by which `sluice chat` finds it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

USUAL_PORT = 8000
# A Unix socket's path has 107 bytes; the longest of ours adds this to the run directory.
LONGEST_SOCKET = len("/prefill-000/transport.sock")
UNIX_PATH_MAX = 107


class PortTaken(OSError):
    """Somebody else listens there."""


@contextlib.contextmanager
def reserved_port(port: int) -> Iterator[int]:
    """A port of loopback that stays ours while the block runs, also while the gateway that listens there is started
    again: bound with SO_REUSEADDR and never listening, which lets the gateway bind beside it and nobody else be given
    it. 0: the usual one, or a free one where that is taken. Raises PortTaken."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port or USUAL_PORT))
        except (OSError, OverflowError) as error:
            if port:
                why = getattr(error, "strerror", None) or str(error)
                raise PortTaken(f"--port {port}: {why}; give another, or leave it out for a free one") from error
            sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


@contextlib.contextmanager
def run_directory() -> Iterator[Path]:
    """Private to this user, gone afterwards, and short enough for the sockets in it."""
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) + len("/sluice-12345678") + LONGEST_SOCKET > UNIX_PATH_MAX:
        base = "/tmp"
    directory = Path(tempfile.mkdtemp(prefix="sluice-", dir=base))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def note_path() -> Path:
    """The note of this user's latest `sluice up`."""
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"{tempfile.gettempdir()}/sluice-{os.getuid()}"
    return Path(runtime) / "sluice-up.json"


def write_note(url: str, model: str) -> None:
    """Raises OSError when the place is somebody else's; serving goes on without a note."""
    path = note_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.parent.lstat().st_uid != os.getuid():
        raise PermissionError(f"{path.parent} belongs to somebody else")
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps({"url": url, "pid": os.getpid(), "model": model}))
    fresh.replace(path)


def read_note() -> str:
    """URL of the `sluice up` that runs here. Raises OSError when there is none."""
    try:
        told = json.loads(note_path().read_text())
        os.kill(int(told["pid"]), 0)
        return str(told["url"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileNotFoundError("no `sluice up` of yours runs on this machine") from error


def remove_note() -> None:
    """Only if it is ours: another `sluice up` may have started since."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if int(json.loads(note_path().read_text())["pid"]) == os.getpid():
            note_path().unlink()
            if "XDG_RUNTIME_DIR" not in os.environ:
                note_path().parent.rmdir()
