"""Which threads are watched, and what it means when one of them freezes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from sluice_protocol.generate import Role


class Reason(StrEnum):
    SCHEDULER_FROZEN = "SchedulerFrozen"
    EVENT_LOOP_BLOCKED = "EventLoopBlocked"
    LEASE_THREAD_DEAD = "LeaseThreadDead"
    RANK_FROZEN = "RankFrozen"
    RANK_DEAD = "RankDead"
    DEVICE_STUCK = "DeviceStuck"
    COLLECTIVE_STUCK = "CollectiveStuck"
    TRANSFER_STALLED = "TransferStalled"
    QUEUE_STARVED = "QueueStarved"
    TIER_STUCK = "TierStuck"
    NOT_ACCEPTING = "NotAccepting"
    RPC_FROZEN = "RpcFrozen"
    DRAIN_STALLED = "DrainStalled"
    TOKENIZER_STUCK = "TokenizerStuck"
    START_STALLED = "StartStalled"
    START_FAILED = "StartFailed"
    SUPERVISOR_FAILED = "SupervisorFailed"
    STEP_DIVERGENCE = "StepDivergence"
    MEMORY_CORRUPT = "MemoryCorrupt"
    LEADER_DEAD = "LeaderDead"
    SIDECAR_DEAD = "SidecarDead"
    GATEWAY_DEAD = "GatewayDead"
    ZYGOTE_DEAD = "ZygoteDead"
    THREAD_DEAD = "ThreadDead"


@dataclass(frozen=True, slots=True)
class Watched:
    """A row. `ticks`: its loop turns at least once a second, whatever there is to do. `frozen`: the reason when it does
    not, and `stalled` the reason when it turns but its counter stands while something is pending."""

    name: str
    process: str
    ticks: bool
    frozen: Reason
    stalled: Reason


LEADER_LOOP = Watched("leader.loop", "leader", True, Reason.SCHEDULER_FROZEN, Reason.QUEUE_STARVED)
LEADER_QUEUE = Watched("leader.queue", "leader", False, Reason.QUEUE_STARVED, Reason.QUEUE_STARVED)
LEADER_RUNNING = Watched("leader.running", "leader", False, Reason.QUEUE_STARVED, Reason.QUEUE_STARVED)
LEASE_THREAD = Watched("leader.lease", "leader", True, Reason.LEASE_THREAD_DEAD, Reason.LEASE_THREAD_DEAD)
SIDECAR_SOCKET = Watched("sidecar.socket", "sidecar", True, Reason.TRANSFER_STALLED, Reason.TRANSFER_STALLED)
SIDECAR_POLLER = Watched("sidecar.poller", "sidecar", True, Reason.TRANSFER_STALLED, Reason.TRANSFER_STALLED)
SIDECAR_VERIFIER = Watched("sidecar.verifier", "sidecar", False, Reason.TRANSFER_STALLED, Reason.TRANSFER_STALLED)
LEADER_ACCEPT = Watched("leader.accept", "leader", False, Reason.NOT_ACCEPTING, Reason.NOT_ACCEPTING)
GATEWAY_ACCEPT = Watched("gateway.accept", "gateway", False, Reason.NOT_ACCEPTING, Reason.NOT_ACCEPTING)
LEADER_GRPC = Watched("leader.grpc", "leader", False, Reason.RPC_FROZEN, Reason.RPC_FROZEN)
GATEWAY_GRPC = Watched("gateway.grpc", "gateway", False, Reason.RPC_FROZEN, Reason.RPC_FROZEN)
GATEWAY_LOOP = Watched("gateway.loop", "gateway", True, Reason.EVENT_LOOP_BLOCKED, Reason.QUEUE_STARVED)
TOKENIZER = Watched("gateway.tokenizer", "gateway", False, Reason.TOKENIZER_STUCK, Reason.TOKENIZER_STUCK)
TIER_COPIER = Watched("leader.tier", "leader", True, Reason.TIER_STUCK, Reason.TIER_STUCK)
HICACHE_CLIENT = Watched("leader.hicache", "leader", True, Reason.TIER_STUCK, Reason.TIER_STUCK)


def rank_rows(rank: int) -> tuple[Watched, Watched, Watched]:
    """(loop, device, collectives) of one rank."""
    process = f"rank{rank}"
    return (
        Watched(f"{process}.loop", process, True, Reason.RANK_FROZEN, Reason.RANK_FROZEN),
        Watched(f"{process}.device", process, False, Reason.DEVICE_STUCK, Reason.DEVICE_STUCK),
        Watched(f"{process}.collective", process, False, Reason.COLLECTIVE_STUCK, Reason.COLLECTIVE_STUCK),
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


GATEWAY_ROWS = (GATEWAY_LOOP, GATEWAY_ACCEPT, GATEWAY_GRPC, TOKENIZER)
_NAMED = (
    *(LEADER_LOOP, LEADER_QUEUE, LEADER_RUNNING, LEADER_ACCEPT, LEADER_GRPC, LEASE_THREAD),
    *(SIDECAR_SOCKET, SIDECAR_POLLER, SIDECAR_VERIFIER),
    *(*GATEWAY_ROWS, TIER_COPIER, HICACHE_CLIENT),
)


def watched_of(names: Iterable[str]) -> tuple[Watched, ...]:
    """What the rows of these names mean, for whoever has but a recorder; a name of nobody's is left out."""
    found = {row.name: row for row in _NAMED}
    ranks = {int(told[1]) for name in names if (told := re.match(r"rank(\d+)\.", name))}
    found |= {row.name: row for rank in ranks for row in rank_rows(rank)}
    return tuple(found[name] for name in names if name in found)
