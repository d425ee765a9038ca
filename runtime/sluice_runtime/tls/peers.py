"""The names that certificates give, and the calls that each may make. A call without an entry may not be made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Peer(StrEnum):
    """The roles that certificates name. `ENGINE`: the second name of every engine, for callers that do not know its
    role."""

    PREFILL = "prefill"
    DECODE = "decode"
    UNIFIED = "unified"
    GATEWAY = "gateway"
    OPERATOR = "operator"
    ENGINE = "engine"


ENGINES = frozenset({Peer.PREFILL, Peer.DECODE, Peer.UNIFIED})


@dataclass(frozen=True, slots=True)
class PeerName:
    """`domain`: of one deployment, NAME.NAMESPACE.sluice.dev."""

    peer: Peer
    domain: str

    def __str__(self) -> str:
        return f"{self.peer}.{self.domain}"

    def of(self, peer: Peer) -> PeerName:
        """Another peer of the same deployment."""
        return PeerName(peer, self.domain)

    @classmethod
    def parse(cls, text: str) -> PeerName:
        """Raises ValueError."""
        role, _, domain = text.partition(".")
        if not domain:
            raise ValueError(f"{text!r} is no ROLE.NAME.NAMESPACE.sluice.dev")
        return cls(Peer(role), domain)


_ASKED_BY_BOTH = frozenset({Peer.GATEWAY, Peer.OPERATOR})
_GATEWAY, _OPERATOR, _DECODE = frozenset({Peer.GATEWAY}), frozenset({Peer.OPERATOR}), frozenset({Peer.DECODE})

CALLERS: Mapping[str, frozenset[Peer]] = {
    "/sluice.v1.Engine/Hello": _ASKED_BY_BOTH,
    "/sluice.v1.Engine/Load": _ASKED_BY_BOTH,
    "/sluice.v1.Engine/Generate": _GATEWAY,
    "/sluice.v1.Engine/Attach": _GATEWAY,
    "/sluice.v1.Engine/Inspect": _OPERATOR,
    "/sluice.v1.Engine/Drain": _OPERATOR,
    "/sluice.v1.Source/Hello": _DECODE,
    "/sluice.v1.Source/Lease": _DECODE,
    "/sluice.v1.Fleet/Report": _OPERATOR,
    "/grpc.health.v1.Health/Check": frozenset(Peer),
    "/grpc.health.v1.Health/Watch": frozenset(Peer),
    "/grpc.health.v1.Health/List": frozenset(Peer),
}


def objection(method: str, names: Iterable[str], domain: str) -> str:
    """Why the holder of a certificate with these names may not make this call; empty when it may."""
    told = tuple(names)
    known = frozenset(name.peer for name in map(_parsed, told) if name is not None and name.domain == domain)
    allowed = CALLERS.get(method, frozenset())
    if known & allowed:
        return ""
    whose = f"the {' or '.join(sorted(allowed))}" if allowed else "no role"
    return f"{method} is for {whose} of {domain}; this certificate is of {', '.join(told) or 'no name'}"


def _parsed(text: str) -> PeerName | None:
    try:
        return PeerName.parse(text)
    except ValueError:
        return None
