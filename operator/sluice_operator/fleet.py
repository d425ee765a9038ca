"""What the operator hears from pods and tells them: Engine/Load, Engine/Drain, Fleet/Report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from sluice_operator.observed import GatewayReport, Load, Pod


class Fleet(Protocol):
    """Never raises: who does not answer, within a second or so, is not told of. `addresses`: pod -> IP address."""

    async def loads(self, pods: Iterable[Pod], addresses: Mapping[str, str]) -> Mapping[str, Load]:
        """Of engines, by pod."""

    async def reports(self, pods: Iterable[Pod], addresses: Mapping[str, str]) -> tuple[GatewayReport, ...]:
        """Of gateways."""

    async def drain(self, pod: str, address: str) -> None:
        """Idempotent: refuse new rooms, finish what runs, report empty."""


class SilentFleet:
    """Nobody can be asked. Plan is cautious then: what serves is not taken away, and a drain takes its whole time."""

    async def loads(self, pods: Iterable[Pod], addresses: Mapping[str, str]) -> Mapping[str, Load]:
        return {}

    async def reports(self, pods: Iterable[Pod], addresses: Mapping[str, str]) -> tuple[GatewayReport, ...]:
        return ()

    async def drain(self, pod: str, address: str) -> None:
        return None
