"""The engines that the gateway may use, as values: what they are, and what is known of them now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from sluice_protocol.generate import EngineHello, Load, Role

DOWN = "Down"
"""What an engine lacks that is away, though it is wanted."""


class FleetError(Exception):
    """A fleet description that makes no sense; the message says where."""


@dataclass(frozen=True, slots=True)
class Member:
    """`role` None: it says so itself, in its Hello. `down`: why it is away, though it is wanted; then `address` is what
    its launcher calls it, and nothing listens there."""

    role: Role | None
    address: str
    down: str = ""


@dataclass(frozen=True, slots=True)
class Fleet:
    members: tuple[Member, ...] = ()


def parse_fleet(document: Any) -> Fleet:
    """`{"members": [{"role": ..., "address": ...}]}`, with `name` and `down` in place of `address` for one that is away
    but wanted; other keys are left alone, an address and a name occur once."""
    try:
        told = document["members"]
        if not isinstance(told, list):
            raise TypeError(f"members is no list but a {type(told).__name__}")
        members = tuple(_member(entry) for entry in told)
    except (TypeError, KeyError, ValueError) as error:
        raise FleetError(f"not a fleet: {error!r}") from error
    if len({member.address for member in members}) != len(members):
        raise FleetError("an address or a name occurs twice")
    return Fleet(members)


def _member(entry: Any) -> Member:
    role = Role(entry["role"])
    if "address" in entry:
        return Member(role, str(entry["address"]))
    return Member(role, str(entry["name"]), str(entry["down"]) or "it did not say why")


@dataclass(frozen=True, slots=True)
class Engine:
    """One member as routing sees it. `hello` and `load` are None until it answered; `own` counts this gateway's tries
    that `load` does not know of yet, less those that it still counts though they ended (so it may be negative).
    `suspect`: a try broke there and it was not heard of since. Others are preferred; it may be used all the same.
    """

    member: Member
    hello: EngineHello | None = None
    load: Load | None = None
    own: int = 0
    trouble: str = ""
    suspect: bool = False

    @property
    def role(self) -> Role | None:
        """What it should be; where that is not known, what it says itself."""
        if self.member.role is None and self.hello is not None:
            return self.hello.role
        return self.member.role

    @property
    def unusable(self) -> str:
        """Why no new work may go there; empty when it may."""
        hello, load = self.hello, self.load
        if self.trouble:
            return self.trouble
        if hello is None:
            return "NotConnected"
        if hello.role is not self.role:
            return "WrongRole"
        if load is None:
            return "NoLoad"
        if load.draining:
            return "Draining"
        if load.quarantined:
            return "Quarantined"
        return "NotReady" if load.not_ready else ""

    @property
    def room(self) -> int:
        """Tries that fit now; only for usable engines."""
        assert self.load is not None
        return self.load.max_running - max(0, self.load.running + self.load.waiting + self.own)

    @property
    def busy(self) -> float:
        """Share of the running slots in use, 0..1."""
        assert self.load is not None
        return 1.0 - max(0, self.room) / max(1, self.load.max_running)


_LOAD_TOLD = tuple(told.name for told in fields(Load) if told.name not in ("incarnation", "block_keys"))


def load_report(load: Load | None) -> dict[str, Any] | None:
    """For people: without the block keys."""
    if load is None:
        return None
    return {name: getattr(load, name) for name in _LOAD_TOLD}


@dataclass(frozen=True, slots=True)
class Pair:
    """Where a try goes. In role unified, `prefill` is None and `decode` is the engine that does both."""

    decode: Engine
    prefill: Engine | None = None

    @property
    def engines(self) -> tuple[Engine, ...]:
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(engine.member.address for engine in self.engines)

    @property
    def is_failing(self) -> bool:
        """Whether its decode engine says that it gets no records from its prefill engine."""
        load = self.decode.load
        return load is not None and bool(load.failing_sources) and self.source_address in load.failing_sources

    @property
    def source_address(self) -> str:
        hello = None if self.prefill is None else self.prefill.hello
        return "" if hello is None else hello.source_address


_ROLES = (Role.PREFILL, Role.DECODE, Role.UNIFIED)


def usable_groups(engines: Sequence[Engine]) -> list[tuple[tuple[Engine, ...], tuple[Engine, ...], tuple[Engine, ...]]]:
    """Usable engines by fingerprint, as (prefill, decode, unified); groups that cannot serve are left out."""
    by_facts: dict[Any, dict[Role, list[Engine]]] = {}
    for engine in engines:
        if engine.hello is not None and not engine.unusable:
            by_facts.setdefault(engine.hello.fingerprint, {}).setdefault(engine.hello.role, []).append(engine)
    groups = [[tuple(roles.get(role, ())) for role in _ROLES] for roles in by_facts.values()]
    return [(p, d, u) for p, d, u in groups if u or (p and d)]
