"""What the operator hears from pods and tells them: Engine/Load, Engine/Drain, Fleet/Report. Values, and how they are
read; `fleet_client` is what carries them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from sluice_operator.decide.observed import EngineReport, GatewayReport, Load, Pod
from sluice_operator.names import ENGINE_ROLES, PodRole
from sluice_protocol import fleet as told_by_gateways
from sluice_protocol import generate as told_by_engines
from sluice_runtime.address import split
from sluice_runtime.tls.identity import Identity


@dataclass(frozen=True, slots=True)
class Contact:
    """How the pods of one ModelDeployment are reached. `addresses`: pod -> IP address. `key`: what they all want to
    see; empty while nobody knows it. `identity`: as whom the operator comes to them."""

    namespace: str
    name: str
    addresses: Mapping[str, str] = field(default_factory=dict)
    key: str = ""
    identity: Identity | None = None


@dataclass(frozen=True, slots=True)
class Heard:
    """`loads`: of the engines that answered, by pod. `reports`: of the gateways that did."""

    loads: Mapping[str, Load] = field(default_factory=dict)
    reports: tuple[GatewayReport, ...] = ()


class Fleet(Protocol):
    """Never raises: who does not answer, within a second or two, is not told of."""

    async def look(self, contact: Contact, pods: Iterable[Pod]) -> Heard: ...

    async def drain(self, contact: Contact, pod: Pod) -> None:
        """Idempotent: refuse new rooms, finish what runs, report empty."""

    async def close(self) -> None: ...


def asked_engines(pods: Iterable[Pod]) -> list[Pod]:
    """Who may have work: what runs, be it ready or not. One that only starts has no server yet."""
    return [pod for pod in pods if pod.role in ENGINE_ROLES and pod.started]


def asked_gateways(pods: Iterable[Pod]) -> list[Pod]:
    return [pod for pod in pods if pod.role is PodRole.GATEWAY and pod.ready and pod.is_member]


def read_load(told: told_by_engines.Load, inter_token_p95_ms: float = 0.0) -> Load:
    return Load(
        running=told.running,
        waiting=told.waiting,
        running_pages=told.running_pages,
        reserved_pages=told.reserved_pages,
        total_pages=told.total_pages,
        inter_token_p95_ms=inter_token_p95_ms,
        draining=told.draining,
        empty=told.empty,
        quarantined=told.quarantined,
        incarnation=told.incarnation,
    )


def read_status(told: Any) -> Load | None:
    """From the /status of a supervisor whose engine does not answer: one that it keeps in quarantine serves nobody."""
    if not isinstance(told, Mapping) or told.get("quarantined") is not True:
        return None
    return Load(draining=told.get("draining") is True, empty=True, quarantined=True)


def read_report(
    gateway: str, at: float, told: told_by_gateways.FleetReport, contact: Contact, loads: Mapping[str, Load]
) -> GatewayReport:
    """`at`: when it came, seconds since the epoch. `loads`: what the engines themselves answered, by pod. An engine at
    an address of no pod of ours, or of an earlier life than the one that answered, is left out."""
    pods = {address: pod for pod, address in contact.addresses.items()}
    queue = told.queue
    return GatewayReport(
        pod=gateway,
        at=at,
        queued=queue.for_decode,
        queue_age_ms=float(queue.oldest_for_decode_ms),
        engines=tuple(_read_engines(told, pods, loads)),
        prefill_queued=queue.for_prefill,
        prefill_queue_age_ms=float(queue.oldest_for_prefill_ms),
        troubles={
            pods[host]: f"says {engine.trouble}"
            for engine in told.engines
            if engine.trouble and (host := split(engine.address)[0]) in pods
        },
    )


def _read_engines(
    told: told_by_gateways.FleetReport, pods: Mapping[str, str], loads: Mapping[str, Load]
) -> Iterable[EngineReport]:
    for engine in told.engines:
        pod = pods.get(split(engine.address)[0])
        if pod is None or engine.role is None or engine.role is told_by_engines.Role.UNIFIED or engine.load is None:
            continue
        if pod in loads and loads[pod].incarnation != engine.incarnation:
            continue
        load = read_load(engine.load, engine.inter_token_p95_ms)
        yield EngineReport(pod, PodRole(engine.role.value), engine.fingerprint, load, routed=engine.ready)
