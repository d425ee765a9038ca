"""The identity of this process for as long as it lives: read again when its files change, kept when the new ones are
no good. Servers and channels ask for `current` whenever they begin a connection; what runs is not touched."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sluice_runtime import log
from sluice_runtime.tls.identity import AUTHORITIES, CERTIFICATE, KEY, Identity, IdentityInvalid, read_identity
from sluice_runtime.tls.peers import Peer

LOOK_S = 1.0
# Certificates are renewed with a third of their life left: below this a person should see why one was not.
NEAR_S = 30 * 86400.0
DAY_S = 86400.0
Stamp = tuple[tuple[int, int, int], ...]


class IdentityKeeper:
    """`peer`: the role whose certificate it has to be. `wall`: Unix time in seconds. Raises IdentityInvalid.

    `look` is for one loop; `current` may be read from any thread. `counters`: changed, kept, refused_callers.
    """

    def __init__(self, folder: Path, peer: Peer, wall: Callable[[], float] = time.time, near_s: float = NEAR_S) -> None:
        self._folder, self._wall, self._near_s = folder, wall, near_s
        self._stamp = _stamp(folder)
        self.current = read_identity(folder)
        if self.current.name.peer is not peer:
            raise IdentityInvalid(f"{folder / CERTIFICATE} is of the {self.current.name.peer}, this is the {peer}")
        self.counters: Counter[str] = Counter()
        self._looked_at = float("-inf")
        self._warned_at = float("-inf")
        self._said = ""
        log.info("certificate read", **self._fields())
        self._warn()

    @property
    def left_s(self) -> float:
        """Until it runs out; below zero: since it did."""
        return self.current.not_after - self._wall()

    def look(self) -> bool:
        """Cheap, for a loop's every turn. Whether `current` is another one now."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_S:
            return False
        self._looked_at = now
        changed = self._read()
        self._warn()
        return changed

    def describe(self) -> dict[str, Any]:
        """For the flight recorder, and from there for metrics. Nothing secret."""
        current = self.current
        return {
            "name": str(current.name),
            "not_after": current.not_after,
            "trusted": list(current.trusted),
            "counters": dict(self.counters),
            "kept_because": self._said,
        }

    def _read(self) -> bool:
        stamp = _stamp(self._folder)
        if stamp == self._stamp:
            self._said = ""
            return False
        try:
            fresh = read_identity(self._folder)
            self._check(fresh)
        except IdentityInvalid as error:
            self._keep(str(error))
            return False
        if _stamp(self._folder) != stamp:
            return False  # they change at this moment: the next look sees what came of it
        self._stamp, self._said = stamp, ""
        if fresh == self.current:
            return False
        self.current = fresh
        self.counters["changed"] += 1
        log.info("certificate changed", **self._fields())
        return True

    def _check(self, fresh: Identity) -> None:
        if fresh.name != self.current.name:
            raise IdentityInvalid(f"{self._folder / CERTIFICATE} is of {fresh.name}, this is {self.current.name}")
        if fresh.not_after < min(self._wall(), self.current.not_after):
            raise IdentityInvalid(f"{self._folder / CERTIFICATE} has expired, and earlier than the one there was")

    def _keep(self, why: str) -> None:
        """Once per reason: half of a change may be seen many times."""
        if why != self._said:
            self._said = why
            self.counters["kept"] += 1
            log.warning("certificate kept", why=why, **self._fields())

    def _warn(self) -> None:
        now = self._wall()
        if self.left_s < self._near_s and abs(now - self._warned_at) >= DAY_S:
            self._warned_at = now
            log.warning("certificate expires soon" if self.left_s > 0 else "certificate has expired", **self._fields())

    def _fields(self) -> dict[str, object]:
        current = self.current
        expires = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(current.not_after))
        return {"name": current.name, "expires": expires, "trusted": ",".join(current.trusted)}


def _stamp(folder: Path) -> Stamp:
    """Changes when a file does, also by a link above it. One that is not there is a stamp too."""
    told = []
    for name in (CERTIFICATE, KEY, AUTHORITIES):
        try:
            status = (folder / name).stat()
            told.append((status.st_mtime_ns, status.st_size, status.st_ino))
        except OSError:
            told.append((0, 0, 0))
    return tuple(told)
