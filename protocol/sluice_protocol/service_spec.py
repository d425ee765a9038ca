"""What its launcher can set about any service: how its health is judged and kept, and how it logs."""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec

# The flight recorder, in the run directory.
RECORDER_FILE = "recorder"


class LogFormat(StrEnum):
    HUMAN = "human"
    JSON = "json"
    OFF = "off"


class HealthSpec(msgspec.Struct, frozen=True):
    """Raises ValueError that names the field and what would do (as part of a document: msgspec.ValidationError).

    Budgets of the verdict, and what is kept. `floor_s`: nothing is called wedged earlier. `factor`: over the time
    that a step should take. `start_s`: a start that loads nothing. `evidence_dir`: else `evidence` in `run_dir`.

    `quarantine_s` 0: never; else after `quarantine_after` incidents within `quarantine_window_s` the supervisor stays
    up, not ready, for so long. `termination_path`: a file that gets the one-line cause of death.
    """

    floor_s: float = 30.0
    factor: float = 20.0
    start_s: float = 120.0
    evidence_dir: str = ""
    max_bundles: int = 5
    max_bundle_mib: int = 64
    quarantine_after: int = 3
    quarantine_window_s: float = 600.0
    quarantine_s: float = 600.0
    termination_path: str = ""
    debug_port: int = 0

    def __post_init__(self) -> None:
        for name in ("floor_s", "start_s", "quarantine_window_s"):
            self._check(name, 0 < getattr(self, name) < math.inf, "seconds above 0")
        self._check("factor", 1 <= self.factor < math.inf, "1 or more: work may take as long as it should")
        for name in ("max_bundles", "max_bundle_mib", "quarantine_after"):
            self._check(name, getattr(self, name) >= 1, "1 or more")
        self._check("quarantine_s", 0 <= self.quarantine_s < math.inf, "seconds, or 0 for never")
        self._check("debug_port", 0 <= self.debug_port <= 65535, "a port, or 0 for any that is free")

    def _check(self, name: str, holds: bool, what_would_do: str) -> None:
        if not holds:
            raise ValueError(f"{name} is {getattr(self, name):g}; give {what_would_do}")
