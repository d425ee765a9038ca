"""Messages of a gateway to the operator (`sluice.v1.Fleet`)."""

from __future__ import annotations

from dataclasses import dataclass

from sluice_protocol.generate import Load, Role

# A report stays below 100 KiB, whatever the fleet is.
MAX_ENGINES, MAX_TROUBLE = 512, 120


@dataclass(frozen=True, slots=True)
class Queue:
    """Choices that wait for a place. `for_prefill`: decode has room for them and prefill has not; `for_decode`: all
    others that have no place to go to. One that only pauses before its next try is in `length` alone. Ages are of the
    oldest one, in milliseconds; 0 if there is none."""

    length: int = 0
    for_prefill: int = 0
    for_decode: int = 0
    oldest_for_prefill_ms: int = 0
    oldest_for_decode_ms: int = 0


@dataclass(frozen=True, slots=True)
class RoutedEngine:
    """One engine as a gateway knows it. `role` None, `fingerprint` (hex) and `incarnation` empty: no Hello yet.

    `ready`: it gets new work; else `trouble` says why not. `inter_token_p95_ms`: as this gateway saw it lately, 0 while
    nothing runs. `load`: the last one, `load_age_ms` old, without block keys.
    """

    address: str
    role: Role | None = None
    fingerprint: str = ""
    incarnation: str = ""
    ready: bool = False
    draining: bool = False
    trouble: str = ""
    inter_token_p95_ms: float = 0.0
    load: Load | None = None
    load_age_ms: int = 0


@dataclass(frozen=True, slots=True)
class FleetReport:
    """`ready`: some pair of engines could take a request. `running`: choices that have a place. `engines_omitted`: more
    than MAX_ENGINES."""

    gateway_id: str
    ready: bool
    running: int = 0
    queue: Queue = Queue()
    engines: tuple[RoutedEngine, ...] = ()
    engines_omitted: int = 0
