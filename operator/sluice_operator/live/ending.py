"""How the process comes to its end in a bounded time, whatever libraries have in mind."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterable
from typing import Any

# A task of ours ends within one turn of the loop; a library's may say goodbye to somebody.
END_S = 2.0


async def end(tasks: Iterable[asyncio.Task[Any]]) -> set[asyncio.Task[Any]]:
    """Cancel them, and wait for END_S; those that have not ended then."""
    tasks = set(tasks)
    for task in tasks:
        task.cancel()
    return (await asyncio.wait(tasks, timeout=END_S))[1] if tasks else set()


def stop_on_signals(stop: asyncio.Event) -> None:
    """SIGTERM and SIGINT set it, whoever has handled them until now."""
    for sig in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(sig, stop.set)
