"""The threads of an engine that its supervisor watches, and what it means if one of them freezes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from enum import StrEnum

from sluice_protocol.generate import Role
from sluice_runtime.health.layout import Phase
from sluice_runtime.health.reading import Exit
from sluice_runtime.health.watched import Excuse, Reason, Watched


class EngineReason(StrEnum):
    """Why an engine was ended, beside what any service may be ended for."""

    SCHEDULER_FROZEN = "SchedulerFrozen"
    LEASE_THREAD_DEAD = "LeaseThreadDead"
    RANK_FROZEN = "RankFrozen"
    RANK_DEAD = "RankDead"
    DEVICE_STUCK = "DeviceStuck"
    COLLECTIVE_STUCK = "CollectiveStuck"
    TRANSFER_STALLED = "TransferStalled"
    TIER_STUCK = "TierStuck"
    STEP_DIVERGENCE = "StepDivergence"
    MEMORY_CORRUPT = "MemoryCorrupt"
    LEADER_DEAD = "LeaderDead"
    SIDECAR_DEAD = "SidecarDead"
    ZYGOTE_DEAD = "ZygoteDead"


class EngineMirror(StrEnum):
    """Documents that an engine's processes keep in the recorder: the leader's books and leases, the sidecar's pulls."""

    BOOKS = "books"
    LEASES = "leases"
    TRANSFERS = "transfers"


class EngineWriter(StrEnum):
    """Processes of an engine that write lines into the recorder."""

    LEADER = "leader"
    RANK = "rank"
    SIDECAR = "sidecar"


_LOOP = "leader.loop"
# A lease thread that has not turned for so long is no reason to end anything, but one to send no new work.
_LEASE_SILENT_S = 4.0

LEADER_LOOP = Watched(
    _LOOP,
    "leader",
    True,
    EngineReason.SCHEDULER_FROZEN,
    Reason.QUEUE_STARVED,
    frozen_in={Phase.SERVING: (Reason.EVENT_LOOP_BLOCKED, _LOOP)},
    leads_start=True,
    loaded=("count_a",),  # bytes of weights that it has read for the fingerprint
)
LEADER_QUEUE = Watched(
    "leader.queue",
    "leader",
    False,
    Reason.QUEUE_STARVED,
    Reason.QUEUE_STARVED,
    behind=_LOOP,
    excuse=Excuse.STEP,
    paced_by=_LOOP,
)
LEADER_RUNNING = replace(LEADER_QUEUE, name="leader.running", excuse=Excuse.ANY_STEP)
LEADER_ACCEPT = Watched("leader.accept", "leader", False, Reason.NOT_ACCEPTING, Reason.NOT_ACCEPTING, accepts=True)
LEADER_GRPC = Watched(
    "leader.grpc",
    "leader",
    False,
    Reason.RPC_FROZEN,
    Reason.RPC_FROZEN,
    behind=_LOOP,
    excuse=Excuse.LOOP,
    is_work=False,
)
LEASE_THREAD = Watched(
    "leader.lease",
    "leader",
    True,
    EngineReason.LEASE_THREAD_DEAD,
    EngineReason.LEASE_THREAD_DEAD,
    ended=EngineReason.LEASE_THREAD_DEAD,
    holds=True,
    unready_after_s=_LEASE_SILENT_S,
)
_STALLED = EngineReason.TRANSFER_STALLED
SIDECAR_SOCKET = Watched("sidecar.socket", "sidecar", True, _STALLED, _STALLED)
SIDECAR_POLLER = Watched("sidecar.poller", "sidecar", True, _STALLED, _STALLED)
SIDECAR_VERIFIER = Watched("sidecar.verifier", "sidecar", False, _STALLED, _STALLED)
TIER_COPIER = Watched("leader.tier", "leader", True, EngineReason.TIER_STUCK, EngineReason.TIER_STUCK)
HICACHE_CLIENT = Watched("leader.hicache", "leader", True, EngineReason.TIER_STUCK, EngineReason.TIER_STUCK)

_NAMED = (
    *(LEADER_LOOP, LEADER_QUEUE, LEADER_RUNNING, LEADER_ACCEPT, LEADER_GRPC, LEASE_THREAD),
    *(SIDECAR_SOCKET, SIDECAR_POLLER, SIDECAR_VERIFIER, TIER_COPIER, HICACHE_CLIENT),
)
_DEATHS = {"leader": EngineReason.LEADER_DEAD, "sidecar": EngineReason.SIDECAR_DEAD}
_REASONS = frozenset((*Reason, *EngineReason))


def rank_rows(rank: int) -> tuple[Watched, Watched, Watched]:
    """(loop, device, collectives) of one rank."""
    process = f"rank{rank}"
    loop, device, collective = (f"{process}.{part}" for part in ("loop", "device", "collective"))
    stuck, waits = EngineReason.DEVICE_STUCK, EngineReason.COLLECTIVE_STUCK
    return (
        Watched(
            loop,
            process,
            True,
            EngineReason.RANK_FROZEN,
            EngineReason.RANK_FROZEN,
            frozen_in={Phase.DEVICE: (stuck, device), Phase.COLLECTIVE: (waits, collective)},
            paced_by=_LOOP,
            loaded=("count_a", "progress"),  # bytes of weights, and the steps of the warm-up
        ),
        Watched(device, process, False, stuck, stuck, paced_by=_LOOP),
        Watched(collective, process, False, waits, waits, paced_by=_LOOP),
    )


def engine_rows(role: Role, transport: str, ranks: int = 1) -> tuple[Watched, ...]:
    """All rows of an engine's container. The tiers' rows come with the tiers."""
    rows: list[Watched] = [LEADER_LOOP, LEADER_QUEUE, LEADER_RUNNING, LEADER_ACCEPT, LEADER_GRPC]
    if role is not Role.UNIFIED:
        rows.append(LEASE_THREAD)
        if transport == "nixl":
            rows += [SIDECAR_SOCKET, SIDECAR_POLLER, SIDECAR_VERIFIER]
    for rank in range(ranks):
        rows += rank_rows(rank)
    return tuple(rows)


def engine_rows_named(names: Iterable[str]) -> tuple[Watched, ...]:
    """What the rows of these names mean, for a reader that has only a recorder; unknown names are left out."""
    names = tuple(names)
    found = {row.name: row for row in _NAMED}
    ranks = {int(match[1]) for name in names if (match := re.match(r"rank(\d+)\.", name))}
    found |= {row.name: row for rank in ranks for row in rank_rows(rank)}
    return tuple(found[name] for name in names if name in found)


def named_death(gone: Exit) -> Exit:
    """The death of a process of an engine, with one of the reasons that an engine can be ended for."""
    otherwise = EngineReason.RANK_DEAD if gone.process.startswith("rank") else EngineReason.ZYGOTE_DEAD
    return gone.named(_REASONS, _DEATHS.get(gone.process, otherwise))
