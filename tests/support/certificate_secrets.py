"""The Secrets of one ModelDeployment in memory, obeying steps of `rotation`: facts alone, or with real certificates."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

from sluice_operator.keys import certificates
from sluice_operator.keys.certificates import Authorities, Issued
from sluice_operator.keys.rotation import (
    BeginRotation,
    FinishRotation,
    IssueLeaf,
    MakeAuthority,
    SeenAuthority,
    SeenCertificates,
    SeenLeaf,
    SetTrust,
)
from sluice_operator.names import PodRole


@dataclass
class FactSecrets:
    """No keys. `ended`: until when each CA lasts."""

    seen: SeenCertificates = field(default_factory=SeenCertificates)
    numbers: itertools.count = field(default_factory=itertools.count)

    def _fresh(self, not_after: float) -> SeenAuthority:
        return SeenAuthority(f"ca-{next(self.numbers)}", not_after)

    def obey(self, step) -> None:
        seen = self.seen
        leaves = dict(seen.leaves)
        match step:
            case MakeAuthority(not_after):
                assert seen.current is None
                self.seen = replace(seen, current=self._fresh(not_after), next=None)
            case BeginRotation(current, not_after):
                assert seen.current.id == current
                assert seen.next is None
                self.seen = replace(seen, next=self._fresh(not_after))
            case FinishRotation(current, follower):
                assert (seen.current.id, seen.next.id) == (current, follower)
                self.seen = replace(seen, current=seen.next, next=None)
            case IssueLeaf(role, signer, trusted, not_after):
                keys = {a.id: a for a in (seen.current, seen.next) if a is not None}
                assert signer in trusted
                leaves[role] = SeenLeaf(signer, min(not_after, keys[signer].not_after), trusted)
                self.seen = replace(seen, leaves=leaves)
            case SetTrust(role, trusted):
                assert leaves[role].issuer in trusted
                leaves[role] = replace(leaves[role], trusted=trusted)
                self.seen = replace(seen, leaves=leaves)


class RealSecrets:
    """With keys: `leaves` are what Secrets hold, by role."""

    def __init__(self, name: str = "m", namespace: str = "ns") -> None:
        self.name, self.namespace = name, namespace
        self.authority: Authorities | None = None
        self.leaves: dict[PodRole, Issued] = {}
        self.pems: dict[str, bytes] = {}

    @property
    def seen(self) -> SeenCertificates:
        told = {}
        for role, issued in self.leaves.items():
            leaf = certificates.read_leaf(issued.data(), role.value, self.name, self.namespace)
            self.pems |= leaf.trusted
            told[role] = SeenLeaf(leaf.issuer, leaf.not_after, frozenset(leaf.trusted))
        if self.authority is None:
            return SeenCertificates(leaves=told)
        read = certificates.read_authorities(self.authority.data())
        facts = [None if a is None else SeenAuthority(a.id, a.not_after) for a in (read.current, read.next)]
        self.pems |= {a.id: a.certificate for a in (read.current, read.next) if a is not None}
        return SeenCertificates(facts[0], facts[1], told)

    def obey(self, step) -> None:
        make = certificates.new_authority
        match step:
            case MakeAuthority(not_after):
                self.authority = Authorities(make(self.name, self.namespace, not_after))
            case BeginRotation(_, not_after):
                self.authority = Authorities(self.authority.current, make(self.name, self.namespace, not_after))
            case FinishRotation():
                self.authority = Authorities(self.authority.next)
            case IssueLeaf(role, signer, trusted, not_after):
                self.leaves[role] = self.issue(role.value, signer, trusted, not_after)
            case SetTrust(role, trusted):
                bundle = b"".join(self.pems[id_] for id_ in sorted(trusted))
                self.leaves[role] = replace(self.leaves[role], authorities=bundle)

    def issue(self, role: str, signer: str, trusted, not_after: float) -> Issued:
        """Also for a role without a Secret."""
        known = self.authority.by_id(signer)
        self.pems[signer] = known.certificate
        bundle = [self.pems[id_] for id_ in sorted(trusted)]
        return certificates.issue(known, bundle, role, self.name, self.namespace, not_after)
