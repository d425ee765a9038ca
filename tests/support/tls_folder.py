"""A Secret's volume as kubelet lays it out and changes it, and certificates to put there."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from certificate_secrets import RealSecrets

from sluice_operator.keys.certificates import Issued, issue, new_authority
from sluice_operator.keys.rotation import Lives, rotate
from sluice_operator.names import PodRole

YEAR_S = 365 * 86400.0


class TlsFolder:
    """All files are links into a folder that is another one after each change, by one rename."""

    def __init__(self, path: Path, data: Mapping[str, bytes] | None = None) -> None:
        self.path = path
        self._numbers = itertools.count()
        path.mkdir(parents=True)
        if data is not None:
            self.write(data)

    def write(self, data: Mapping[str, bytes]) -> None:
        fresh = self.path / f"..life-{next(self._numbers)}"
        fresh.mkdir()
        for name, content in data.items():
            (fresh / name).write_bytes(content)
        link, old = self.path / "..data", None
        if link.is_symlink():
            old = link.resolve()
        (self.path / "..data_tmp").symlink_to(fresh.name)
        (self.path / "..data_tmp").rename(link)
        for name in data:
            if not (self.path / name).is_symlink():
                (self.path / name).symlink_to(f"..data/{name}")
        if old is not None:
            shutil.rmtree(old)


def authority(until: float | None = None):
    return new_authority("m", "ns", time.time() + YEAR_S if until is None else until)


def leaf(ca, role: str, trusted=(), until: float | None = None, name: str = "m") -> Issued:
    bundle = [a.certificate for a in (trusted or [ca])]
    return issue(ca, bundle, role, name, "ns", time.time() + YEAR_S if until is None else until)


def secrets() -> RealSecrets:
    """Of a ModelDeployment that has just been made."""
    made = RealSecrets()
    while len(made.leaves) < len(PodRole):
        for step in rotate(made.seen, time.time(), Lives()):
            made.obey(step)
    return made
