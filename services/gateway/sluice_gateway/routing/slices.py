"""What EndpointSlices say about the engines. Pure, and never raises: a slice that makes no sense is empty.

Conditions are not looked at: the engines' Services publish addresses that are not ready too, and an engine says by its
own Hello and Load what it is and whether it takes work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Any

from sluice_runtime.address import join

PORT_NAME = "engine"
# A pod may be in no slice for a moment while it moves from one to another.
LINGER_S = 2.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`pod`: its uid; its address where the slice names none."""

    pod: str
    host: str
    port: int

    @property
    def is_v6(self) -> bool:
        return ":" in self.host

    @property
    def address(self) -> str:
        return join(self.host, self.port)


def read_slice(item: object) -> tuple[Endpoint, ...]:
    told = _object(item)
    family = {"IPv4": 4, "IPv6": 6}.get(str(told.get("addressType")))
    port = _port(_list(told.get("ports")))
    if family is None or port is None:
        return ()
    return tuple(_endpoints(_list(told.get("endpoints")), family, port))


def _endpoints(endpoints: Iterable[object], family: int, port: int) -> Iterator[Endpoint]:
    """All addresses of one endpoint lead to one place: the first one will do."""
    for endpoint in map(_object, endpoints):
        try:
            host = ip_address(str(_list(endpoint.get("addresses"))[0]))
        except (IndexError, ValueError):
            continue
        if host.version == family and not (isinstance(host, IPv6Address) and host.scope_id):
            yield Endpoint(str(_object(endpoint.get("targetRef")).get("uid") or host), str(host), port)


def _port(ports: list[object]) -> int | None:
    """The one that is named so, or the only one there is."""
    told = [_object(port) for port in ports]
    named = [port for port in told if port.get("name") == PORT_NAME] or (told if len(told) == 1 else [])
    number = named[0].get("port") if named else None
    return number if isinstance(number, int) and 0 < number < 65536 else None


def addresses_of(slices: Iterable[Iterable[Endpoint]], prefer_v6: bool) -> frozenset[str]:
    """One address for each pod, however many slices and families it is in."""
    chosen: dict[str, Endpoint] = {}
    for endpoint in sorted((e for part in slices for e in part), key=lambda e: (e.is_v6 is not prefer_v6, e.address)):
        chosen.setdefault(endpoint.pod, endpoint)
    return frozenset(endpoint.address for endpoint in chosen.values())


@dataclass(frozen=True, slots=True)
class Present:
    """`missing`: addresses that are told of no more, and since when; they stay for LINGER_S."""

    addresses: frozenset[str] = frozenset()
    missing: tuple[tuple[str, float], ...] = ()

    def then(self, told: frozenset[str], now: float) -> Present:
        since = dict(self.missing)
        gone = {address: since.get(address, now) for address in self.addresses - told}
        kept = {address: at for address, at in gone.items() if now - at < LINGER_S}
        return Present(told | kept.keys(), tuple(sorted(kept.items())))


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
