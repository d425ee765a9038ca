"""The fault points of a gateway."""

from __future__ import annotations

GATEWAY_POINTS = {
    "gateway.turn": "a turn of the gateway's loop",
    "gateway.tokenize": "a prompt is about to be tokenised in the pool",
}
