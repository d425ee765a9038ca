"""What happened here before, kept beside the bundles, and when that is enough to stay down for a person to look."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

FILE_NAME = "incidents.jsonl"
MAX_KEPT = 200


@dataclass(frozen=True, slots=True)
class Incident:
    """`at_s`: seconds since the boot `boot`, so that restarts of the container and jumps of the wall clock change
    nothing."""

    boot: str
    at_s: float
    reason: str
    culprit: str
    message: str


@dataclass(frozen=True, slots=True)
class QuarantinePolicy:
    """After `incidents` within `window_s` the supervisor stays up, not ready, for `hold_s`; 0: never."""

    incidents: int = 3
    window_s: float = 600.0
    hold_s: float = 600.0


def must_quarantine(incidents: Sequence[Incident], boot: str, now_s: float, policy: QuarantinePolicy) -> bool:
    """The newest incident is among `incidents`."""
    recent = [told for told in incidents if told.boot == boot and now_s - told.at_s <= policy.window_s]
    return policy.hold_s > 0 and len(recent) >= policy.incidents


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def seconds_since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def read_incidents(folder: Path) -> list[Incident]:
    """Oldest first; a line that cannot be read is left out."""
    try:
        lines = (folder / FILE_NAME).read_text(errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines[-MAX_KEPT:]:
        try:
            told = json.loads(line)
            found.append(Incident(**told | {"at_s": float(told["at_s"])}))
        except (ValueError, TypeError, KeyError):
            continue
    return found


def note_incident(folder: Path, incident: Incident) -> list[Incident]:
    """All that are known, with this one. Raises OSError; the file is replaced, not appended to, so it stays bounded."""
    known = [*read_incidents(folder), incident][-MAX_KEPT:]
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / f"{FILE_NAME}.new"
    fresh.write_text("".join(json.dumps(asdict(told)) + "\n" for told in known))
    fresh.replace(folder / FILE_NAME)
    return known
