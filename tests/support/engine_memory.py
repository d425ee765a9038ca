"""The cache records of a running engine, as a test changes them behind its back: its memfd, opened by way of /proc."""

from __future__ import annotations

import os
from pathlib import Path

from stack_double import EngineProcess, RunningStack

from sluice_engine.pool import RecordPool, map_pools
from sluice_engine.spec import load_spec, resolve
from sluice_records import RecordKind, TrailerError


class EngineMemory:
    """Use as a context manager."""

    def __init__(self, stack: RunningStack, engine: EngineProcess) -> None:
        resolved = resolve(load_spec(next(stack.directory.glob(f"{engine.name}-*/spec.json"))))
        links = Path(f"/proc/{engine.pid('rank')}/fd").iterdir()
        (name,) = [link for link in links if str(link.readlink()).startswith(f"/memfd:sluice-{engine.name}")][:1]
        self._fd = os.open(name, os.O_RDWR)
        self.pools = map_pools(self._fd, resolved.layouts, resolved.pools)

    def __enter__(self) -> EngineMemory:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._fd)

    def closed(self, kind: RecordKind) -> list[int]:
        """Records that have a trailer: closed now, or in a generation that has ended since."""
        return [record for record in range(self.pools[kind].num_records) if _has_trailer(self.pools[kind], record)]

    def flip(self, kind: RecordKind, record: int, at: int = 9, bit: int = 0x20) -> None:
        self.pools[kind].memory(record)[at] ^= bit


def _has_trailer(pool: RecordPool, record: int) -> bool:
    try:
        pool.trailer(record)
    except TrailerError:
        return False
    return True
