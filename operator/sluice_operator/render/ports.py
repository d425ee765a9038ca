"""Ports of our pods: fixed, so that policies can be exact."""

from __future__ import annotations

from typing import Any

ENGINE = 7000  # sluice.v1.Engine: gateway and operator
SOURCE = 7001  # sluice.v1.Source: decode engines open leases here
PROBE = 7002  # probes and metrics
DEBUG = 7003  # loopback only
TRANSFER_FIRST, TRANSFER_LAST = 23000, 23020  # NIXL over TCP
HTTP = 8000  # OpenAI API and probes of the gateway
CONTROL = 8001  # Fleet/Report
SERVICE = 80


def tcp(port: int, last: int | None = None) -> dict[str, Any]:
    """A port, or a range of them, of a NetworkPolicy."""
    return {"protocol": "TCP", "port": port} | ({} if last is None else {"endPort": last})
