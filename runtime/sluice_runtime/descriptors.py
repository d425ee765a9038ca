"""How many files a process may hold open."""

from __future__ import annotations

import contextlib
import resource


def raise_limit() -> None:
    """Up to what the system allows it. The usual soft limit, 1024, is there for programs that wait with `select`; what
    is started by this process inherits the new one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a system that has another bound: as it was
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
