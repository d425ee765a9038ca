"""What a gateway tells the operator of its engines and its queue. Pure, and bounded in size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sluice_gateway.routing.fleet import Engine
from sluice_protocol.fleet import MAX_ENGINES, MAX_TROUBLE, FleetReport, Queue, RoutedEngine


@dataclass(frozen=True, slots=True)
class Known:
    """One link: its view, how old the Load in it is, and the times between tokens that came over it."""

    view: Engine
    load_age_s: float = 0.0
    inter_token_p95_ms: float = 0.0


def make_report(gateway_id: str, ready: bool, running: int, queue: Queue, links: Sequence[Known]) -> FleetReport:
    told = sorted(links, key=lambda known: (bool(known.view.unusable), known.view.member.address))
    engines = tuple(describe_engine(known) for known in told[:MAX_ENGINES])
    return FleetReport(gateway_id, ready, running, queue, engines, len(told) - len(engines))


def describe_engine(known: Known) -> RoutedEngine:
    """Engines that get work come first, so that those that are left out are the others."""
    view, hello, load = known.view, known.view.hello, known.view.load
    return RoutedEngine(
        address=view.member.address,
        role=view.role,
        fingerprint="" if hello is None else hello.fingerprint.digest.hex(),
        incarnation="" if hello is None else hello.incarnation,
        ready=not view.unusable,
        draining=load is not None and load.draining,
        trouble=view.unusable[:MAX_TROUBLE],
        inter_token_p95_ms=known.inter_token_p95_ms,
        load=None if load is None else replace(load, block_keys=()),
        load_age_ms=int(known.load_age_s * 1e3),
    )
