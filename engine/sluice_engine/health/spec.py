"""What can be set about the health of a service, as whoever starts it writes it down."""

from __future__ import annotations

import msgspec


class HealthSpec(msgspec.Struct, frozen=True):
    """Budgets of the verdict, and what is kept. `floor_s`: nothing is called wedged earlier. `factor`: over the time
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
