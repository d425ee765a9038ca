"""The log of a process that was started here: one a life, bounded, and what it said last."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import IO

LAST_WORDS_BYTES = 2000
MAX_LOG_BYTES = 32 * 1024 * 1024


def begin_log(path: Path) -> IO[bytes]:
    """That of the life before stays beside it: it has the last words that a bundle points to. Raises OSError."""
    if path.exists():
        path.replace(_older(path))
    return path.open("ab")  # of a file that is cut: a writer that knew its place would leave a hole there


def bound_log(path: Path) -> None:
    """Once it is longer than MAX_LOG_BYTES, so much of its end goes to the file beside it, and it begins anew. What is
    written between the two is lost; so is what came before where nothing can be kept."""
    try:
        size = path.stat().st_size
    except OSError:
        return
    if size <= MAX_LOG_BYTES:
        return
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(size - MAX_LOG_BYTES)
        _older(path).write_bytes(file.read(MAX_LOG_BYTES))
    with contextlib.suppress(OSError):
        os.truncate(path, 0)


def last_words(path: Path) -> str:
    """At most LAST_WORDS_BYTES of its end; empty where it cannot be read."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - LAST_WORDS_BYTES))
            return log.read().decode(errors="replace").strip()
    except OSError:
        return ""


def _older(path: Path) -> Path:
    return path.with_suffix(".log.1")
