"""Which certificate is made next, and who signs it: a pure function of what the Secrets hold.

A CA is replaced in steps, each of which begins when every Secret is as the one before left it, and has been so for
`Lives.settle`: kubelets bring a Secret to its pods within two minutes, and pods look at their files every second.

    begin     the CA's Secret holds a second one that signs nothing yet
    spread    every role's Secret trusts it too; leaves stay                       wait
    reissue   every role's leaf is signed by it                                    wait
    narrow    no role's Secret trusts another any more
    finish    it takes the first one's place

The same steps, from whichever applies, put right what somebody deleted or spoiled; the CA's Secret too, for what the
lost one has signed is trusted until nothing of it is left. No step needs to know the one before: killed anywhere, the
operator goes on, and waits anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sluice_operator.names import PodRole

DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class Lives:
    """Seconds. Renewed when two thirds are over."""

    authority: float = 3650 * DAY_S
    leaf: float = 365 * DAY_S
    settle: float = 600.0


@dataclass(frozen=True, slots=True)
class SeenAuthority:
    """Of one CA, what may be told."""

    id: str
    not_after: float


@dataclass(frozen=True, slots=True)
class SeenLeaf:
    """Of a role's Secret. `issuer`, `trusted`: ids of CAs."""

    issuer: str
    not_after: float
    trusted: frozenset[str]


@dataclass(frozen=True, slots=True)
class SeenCertificates:
    """What the Secrets hold. Absent: not there, or nothing that makes sense. `steady_s`: since when this operator has
    seen them as they are now, by a clock that nobody sets."""

    current: SeenAuthority | None = None
    next: SeenAuthority | None = None
    leaves: Mapping[PodRole, SeenLeaf] = field(default_factory=dict)
    steady_s: float = 0.0

    @property
    def target(self) -> SeenAuthority | None:
        """Who is to have signed everything in the end."""
        return self.next or self.current


@dataclass(frozen=True, slots=True)
class MakeAuthority:
    """There is none that can sign."""

    not_after: float

    def __str__(self) -> str:
        return "make a CA"


@dataclass(frozen=True, slots=True)
class BeginRotation:
    """`current`: whom the new one is to replace."""

    current: str
    not_after: float

    def __str__(self) -> str:
        return f"make a CA that is to replace {self.current}"


@dataclass(frozen=True, slots=True)
class FinishRotation:
    """`next` takes the place of `current`."""

    current: str
    next: str

    def __str__(self) -> str:
        return f"CA {self.next} takes the place of {self.current}"


@dataclass(frozen=True, slots=True)
class IssueLeaf:
    role: PodRole
    signer: str
    trusted: frozenset[str]
    not_after: float

    def __str__(self) -> str:
        return f"issue {self.role} a certificate by CA {self.signer}, trusting {', '.join(sorted(self.trusted))}"


@dataclass(frozen=True, slots=True)
class SetTrust:
    """The same leaf, other CAs beside it."""

    role: PodRole
    trusted: frozenset[str]

    def __str__(self) -> str:
        return f"{self.role} trusts {', '.join(sorted(self.trusted))}"


Step = MakeAuthority | BeginRotation | FinishRotation | IssueLeaf | SetTrust


def rotate(seen: SeenCertificates, now: float, lives: Lives) -> tuple[Step, ...]:
    """What to do now, in any order; nothing when all is well or has to settle. `now`: Unix time, which may jump."""
    current, target = seen.current, seen.target
    if current is None or target is None:
        return (MakeAuthority(now + lives.authority),)
    leaves = sound(seen)
    now = latest(seen, leaves, now, lives)
    if missing := [role for role in PodRole if role not in leaves]:
        return tuple(_issue(current, target, leaves, role, now + lives.leaf) for role in missing)
    if seen.next is None and _is_due(current.not_after, now, lives.authority):
        return (BeginRotation(current.id, now + lives.authority),)
    needed = _in_use(target, leaves)
    if narrow := [role for role, leaf in leaves.items() if not needed <= leaf.trusted]:
        return tuple(SetTrust(role, leaves[role].trusted | needed) for role in narrow)
    if renewed := _renewed(seen, leaves, now, lives):
        return renewed
    return _moved_on(seen, target, leaves, now + lives.leaf) if seen.steady_s >= lives.settle else ()


def sound(seen: SeenCertificates) -> Mapping[PodRole, SeenLeaf]:
    """Leaves that we can have issued. Of a CA whose key was lost this is believed only if another role's Secret trusts
    it too: who can write one Secret must not make everybody trust a CA of his."""
    keys = {a.id for a in (seen.current, seen.next) if a is not None}

    def is_known(role: PodRole, issuer: str) -> bool:
        return issuer in keys or any(issuer in leaf.trusted for other, leaf in seen.leaves.items() if other is not role)

    return {role: leaf for role, leaf in seen.leaves.items() if is_known(role, leaf.issuer)}


def latest(seen: SeenCertificates, leaves: Mapping[PodRole, SeenLeaf], now: float, lives: Lives) -> float:
    """The latest that it can be: no clock is trusted that says it is earlier than when something was issued."""
    issued = [leaf.not_after - lives.leaf for leaf in leaves.values()]
    issued += [a.not_after - lives.authority for a in (seen.current, seen.next) if a is not None]
    return max(now, *issued)


def signer_for(seen: SeenCertificates, others: Iterable[SeenLeaf]) -> str:
    """Whose signature these take for granted by now: the older one's, as long as nobody has begun to drop it."""
    assert seen.current is not None, "there is a CA"
    assert seen.target is not None
    return _signer(seen.current, seen.target, others)


def _signer(current: SeenAuthority, target: SeenAuthority, others: Iterable[SeenLeaf]) -> str:
    return current.id if all(current.id in leaf.trusted for leaf in others) else target.id


def _in_use(target: SeenAuthority, leaves: Mapping[PodRole, SeenLeaf]) -> frozenset[str]:
    """Whom everybody has to trust: those who have signed what is shown, and who is to sign next."""
    return frozenset({target.id, *(leaf.issuer for leaf in leaves.values())})


def _issue(
    current: SeenAuthority, target: SeenAuthority, leaves: Mapping[PodRole, SeenLeaf], role: PodRole, not_after: float
) -> IssueLeaf:
    """For a role that has none. Some pods may still show what the older CA has signed."""
    trusted = _in_use(target, leaves) | {current.id}
    return IssueLeaf(role, _signer(current, target, leaves.values()), trusted, not_after)


def _renewed(seen: SeenCertificates, leaves: Mapping[PodRole, SeenLeaf], now: float, lives: Lives) -> tuple[Step, ...]:
    """Leaves near their end, by who signed them before."""
    keys = {a.id: a for a in (seen.current, seen.next) if a is not None}
    told: list[Step] = []
    for role, leaf in leaves.items():
        signer = keys.get(leaf.issuer)
        if signer is not None and _is_due(leaf.not_after, now, lives.leaf):
            until = min(now + lives.leaf, signer.not_after)
            # By a CA that ends itself nothing would be won.
            if until - leaf.not_after > lives.leaf / 10:
                told.append(IssueLeaf(role, leaf.issuer, leaf.trusted, until))
    return tuple(told)


def _moved_on(
    seen: SeenCertificates, target: SeenAuthority, leaves: Mapping[PodRole, SeenLeaf], not_after: float
) -> tuple[Step, ...]:
    """Everybody trusts the target, so it may sign everything; it has, so nobody needs another."""
    if old := [role for role, leaf in leaves.items() if leaf.issuer != target.id]:
        return tuple(IssueLeaf(role, target.id, leaves[role].trusted, not_after) for role in old)
    if wide := [role for role, leaf in leaves.items() if leaf.trusted != {target.id}]:
        return tuple(SetTrust(role, frozenset({target.id})) for role in wide)
    if seen.next is not None and seen.current is not None:
        return (FinishRotation(seen.current.id, seen.next.id),)
    return ()


def _is_due(not_after: float, now: float, life: float) -> bool:
    return now >= not_after - life / 3
