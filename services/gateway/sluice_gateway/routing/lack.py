"""What keeps waiting requests from a place: for the operator, which can have more engines of one role. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

from sluice_gateway.routing.fleet import Engine
from sluice_gateway.routing.route import Wanted
from sluice_protocol.fingerprint import Fingerprint
from sluice_protocol.fleet import Queue
from sluice_protocol.generate import Role


class Lack(StrEnum):
    """`PREFILL`: some decode engine has room, and no prefill engine that could be its pair. `DECODE`: everything else,
    for a decode engine that is full of sequences which wait for prefill says so in its own Load."""

    PREFILL = "prefill"
    DECODE = "decode"


def roles_with_room(engines: Iterable[Engine]) -> dict[Fingerprint, set[Role]]:
    told: dict[Fingerprint, set[Role]] = {}
    for engine in engines:
        if engine.hello is not None and not engine.unusable and engine.room > 0:
            told.setdefault(engine.hello.fingerprint, set()).add(engine.hello.role)
    return told


def lack(wanted: Wanted, roomy: dict[Fingerprint, set[Role]]) -> Lack | None:
    """None: there is a place, and it only pauses."""
    bound = wanted.fingerprint
    sides = list(roomy.values()) if bound is None else [roomy.get(bound, set())]
    if any(Role.UNIFIED in side or side >= {Role.PREFILL, Role.DECODE} for side in sides):
        return None
    return Lack.PREFILL if any(Role.DECODE in side for side in sides) else Lack.DECODE


def describe_queue(waiting: Sequence[tuple[Wanted, float]], engines: Iterable[Engine]) -> Queue:
    """`waiting`: what is wanted, and for how many seconds by now."""
    roomy = roles_with_room(engines)
    ages: dict[Lack | None, list[float]] = {}
    for wanted, age_s in waiting:
        ages.setdefault(lack(wanted, roomy), []).append(age_s)
    for_prefill, for_decode = ages.get(Lack.PREFILL, []), ages.get(Lack.DECODE, [])
    return Queue(len(waiting), len(for_prefill), len(for_decode), _oldest_ms(for_prefill), _oldest_ms(for_decode))


def _oldest_ms(ages_s: Iterable[float]) -> int:
    return int(max(ages_s, default=0.0) * 1e3)
