"""The threads of a gateway that its supervisor watches, and what it means if one of them freezes."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from sluice_gateway.status.gateway_metrics import GATEWAY_METRICS
from sluice_runtime.health.reading import Copy, Exit
from sluice_runtime.health.service import ServiceKind
from sluice_runtime.health.watched import Excuse, Reason, Watched


class GatewayReason(StrEnum):
    """Why a gateway was ended, beside what any service may be ended for."""

    TOKENIZER_STUCK = "TokenizerStuck"
    GATEWAY_DEAD = "GatewayDead"


GATEWAY_LOOP = Watched("gateway.loop", "gateway", True, Reason.EVENT_LOOP_BLOCKED, Reason.QUEUE_STARVED)
GATEWAY_ACCEPT = Watched("gateway.accept", "gateway", False, Reason.NOT_ACCEPTING, Reason.NOT_ACCEPTING, accepts=True)
GATEWAY_GRPC = Watched(
    "gateway.grpc",
    "gateway",
    False,
    Reason.RPC_FROZEN,
    Reason.RPC_FROZEN,
    behind=GATEWAY_LOOP.name,
    excuse=Excuse.LOOP,
    is_work=False,
)
TOKENIZER = Watched("gateway.tokenizer", "gateway", False, GatewayReason.TOKENIZER_STUCK, GatewayReason.TOKENIZER_STUCK)
GATEWAY_ROWS = (GATEWAY_LOOP, GATEWAY_ACCEPT, GATEWAY_GRPC, TOKENIZER)

# Its one document in the recorder, and the one process that writes there.
GATEWAY_MIRROR = "gateway"


_REASONS = frozenset((*Reason, *GatewayReason))


def _named_death(gone: Exit) -> Exit:
    return gone.named(_REASONS, GatewayReason.GATEWAY_DEAD)


def _report(copy: Copy, now_ns: int) -> dict[str, Any]:
    return {"gateway": copy.mirror(GATEWAY_MIRROR).value}


GATEWAY_KIND = ServiceKind(
    GATEWAY_ROWS, _named_death, (GATEWAY_MIRROR,), (GATEWAY_MIRROR,), _report, metrics=GATEWAY_METRICS
)
