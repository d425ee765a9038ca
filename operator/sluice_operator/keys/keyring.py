"""What this operator has read in the Secrets of one ModelDeployment, and for how long they have been so.

Facts and certificates; of keys only the CA's, which signs the operator's own leaf: that one is in no Secret.
"""

from __future__ import annotations

import base64
import binascii
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sluice_operator import names
from sluice_operator.keys import certificates
from sluice_operator.keys.certificates import Authorities, Authority, Leaf, NotOurs
from sluice_operator.keys.rotation import DAY_S, SeenAuthority, SeenCertificates, SeenLeaf, signer_for
from sluice_operator.names import PodRole
from sluice_runtime.tls.identity import Identity
from sluice_runtime.tls.peers import Peer

Object = Mapping[str, Any]
# Nobody keeps it: a new one is made when half of this is over.
OWN_LIFE_S = DAY_S
log = logging.getLogger(__name__)


@dataclass
class Keyring:
    """`clock`: seconds that nobody sets; `wall`: Unix time. `versions`: resourceVersion by name of Secret."""

    namespace: str
    name: str
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    versions: dict[str, str] = field(default_factory=dict)
    _authorities: Authorities | None = field(default=None, repr=False)
    _leaves: dict[PodRole, Leaf] = field(default_factory=dict)
    _facts: SeenCertificates | None = None
    _since: float = 0.0
    _own: tuple[tuple[str, ...], float, Identity] | None = field(default=None, repr=False)

    def read(self, item: Object) -> None:
        """A Secret of ours, as it is now. What makes no sense is said once and counts as not there."""
        name = item["metadata"]["name"]
        is_new = self.versions.get(name) != item["metadata"]["resourceVersion"]
        self.forget(name)
        self.versions[name] = item["metadata"]["resourceVersion"]
        try:
            data = decode(item)
            if name == names.authority_secret(self.name):
                self._authorities = certificates.read_authorities(data)
            elif role := self._role_of(name):
                self._leaves[role] = certificates.read_leaf(data, role.value, self.name, self.namespace)
        except NotOurs as error:
            if is_new:
                log.warning("%s/%s: Secret %s is made anew: %s", self.namespace, self.name, name, error)

    def forget(self, name: str) -> None:
        """There is no Secret of that name."""
        self.versions.pop(name, None)
        if name == names.authority_secret(self.name):
            self._authorities = None
        elif role := self._role_of(name):
            self._leaves.pop(role, None)

    def seen(self) -> SeenCertificates:
        """Steady since all was read to be as it is."""
        told = self._authorities
        facts = SeenCertificates(
            None if told is None else _fact(told.current),
            None if told is None or told.next is None else _fact(told.next),
            {role: _leaf_fact(leaf) for role, leaf in self._leaves.items()},
        )
        if facts != self._facts:
            self._facts, self._since = facts, self.clock()
        return SeenCertificates(facts.current, facts.next, facts.leaves, self.clock() - self._since)

    def bundle(self, trusted: frozenset[str]) -> list[bytes]:
        """Their certificates, PEM. Raises KeyError for one that is in no Secret any more."""
        known = {id_: pem for leaf in self._leaves.values() for id_, pem in leaf.trusted.items()}
        if self._authorities is not None:
            both = (self._authorities.current, self._authorities.next)
            known |= {authority.id: authority.certificate for authority in both if authority is not None}
        return [known[id_] for id_ in sorted(trusted)]

    def identity(self) -> Identity | None:
        """The operator's own, to call the pods with: signed by whom they believe, and believing whom they show."""
        seen = self.seen()
        if self._authorities is None or not seen.leaves:
            return None
        signer = self._authorities.by_id(signer_for(seen, seen.leaves.values()))
        assert signer is not None, "one of the two"
        trusted = frozenset({signer.id}).union(*(leaf.trusted for leaf in seen.leaves.values()))
        basis, now = (signer.id, *sorted(trusted)), self.wall()
        if self._own is not None and self._own[0] == basis and abs(now - self._own[1]) < OWN_LIFE_S / 2:
            return self._own[2]
        told = certificates.issue(
            signer, self.bundle(trusted), Peer.OPERATOR.value, self.name, self.namespace, now + OWN_LIFE_S
        )
        self._own = basis, now, Identity.of(told.data(), f"the operator's own for {self.namespace}/{self.name}")
        return self._own[2]

    def _role_of(self, name: str) -> PodRole | None:
        return next((role for role in PodRole if names.certificate_secret(self.name, role) == name), None)


def decode(item: Object) -> dict[str, bytes]:
    """Data of a Secret. Raises NotOurs."""
    try:
        return {key: base64.b64decode(value, validate=True) for key, value in (item.get("data") or {}).items()}
    except (binascii.Error, ValueError, TypeError, AttributeError) as error:
        raise NotOurs(f"its data: {error}") from error


def read_key(item: Object) -> str:
    """What pods want to see, from the Secret that has it; empty if that holds nothing that a header could carry."""
    try:
        key = decode(item).get("key", b"").decode("ascii").strip()
    except (NotOurs, UnicodeDecodeError):
        return ""
    return key if key.isprintable() else ""


def encode(data: Mapping[str, bytes]) -> dict[str, str]:
    return {key: base64.b64encode(value).decode() for key, value in data.items()}


def _leaf_fact(leaf: Leaf) -> SeenLeaf:
    return SeenLeaf(leaf.issuer, leaf.not_after, frozenset(leaf.trusted))


def _fact(authority: Authority) -> SeenAuthority:
    return SeenAuthority(authority.id, authority.not_after)
