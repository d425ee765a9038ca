"""The identity of a process for its peers: a certificate, its key and the CAs it trusts, read from a folder as a
Secret's volume lays it out: tls.crt, tls.key, ca.crt.

What is read is used once before anything relies on it: a handshake with itself, in memory. It says whether the key is
the certificate's and the certificate of one of the CAs, and what the certificate says, without a parser of ours.
"""

from __future__ import annotations

import hashlib
import os
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice_runtime.errors import ServiceError
from sluice_runtime.tls.peers import PeerName

CERTIFICATE, KEY, AUTHORITIES = "tls.crt", "tls.key", "ca.crt"
# Kubelet's: all files of a volume change with this one link.
DATA_LINK = "..data"
MAX_BYTES = 1 << 20
# X509_V_FLAG_NO_CHECK_TIME: one that has run out still says its name, and when it did.
_ANY_TIME = 0x200000


class IdentityInvalid(ServiceError):
    """What is in the folder is no identity; the message names the file and the remedy."""


@dataclass(frozen=True, slots=True)
class Identity:
    """`certificate`, `key`, `authorities`: PEM. `not_after`: Unix time in seconds. `trusted`: digests of the CAs."""

    certificate: bytes
    key: bytes = field(repr=False)
    authorities: bytes
    name: PeerName
    not_after: float
    trusted: tuple[str, ...]

    @classmethod
    def of(cls, data: Mapping[str, bytes], where: str = "") -> Identity:
        """From the data of a Secret. Raises IdentityInvalid, which names `where`."""
        certificate, key, authorities = (data[name] for name in (CERTIFICATE, KEY, AUTHORITIES))
        try:
            told, trusted = _use(certificate, key, authorities)
        except (ssl.SSLError, ValueError) as error:
            remedy = "all three have to be of one Secret, as the operator writes it"
            raise IdentityInvalid(f"{where}: {CERTIFICATE}, {KEY}, {AUTHORITIES}: {error}: {remedy}") from error
        names = [value for kind, value in told.get("subjectAltName", ()) if kind == "DNS"]
        try:
            name = PeerName.parse(names[0])
        except (IndexError, ValueError) as error:
            raise IdentityInvalid(
                f"{where}: {CERTIFICATE}: its first DNS name is to be ROLE.DOMAIN: {error}"
            ) from error
        return cls(certificate, key, authorities, name, ssl.cert_time_to_seconds(told["notAfter"]), trusted)


def read_identity(folder: Path) -> Identity:
    """Raises IdentityInvalid."""
    data: dict[str, bytes] = {}
    # Through the link once, so that all three are of the same life of the Secret.
    there = (folder / DATA_LINK).resolve() if (folder / DATA_LINK).exists() else folder
    for name in (CERTIFICATE, KEY, AUTHORITIES):
        try:
            with (there / name).open("rb") as file:
                data[name] = file.read(MAX_BYTES)
        except OSError as error:
            remedy = f"the folder needs {CERTIFICATE}, {KEY} and {AUTHORITIES}"
            raise IdentityInvalid(f"{folder / name}: {error.strerror or error}: {remedy}") from error
    return Identity.of(data, str(folder))


def context_of(identity: Identity, purpose: int = ssl.PROTOCOL_TLS_CLIENT) -> ssl.SSLContext:
    """For the standard library's TLS. Raises ssl.SSLError."""
    return _context(purpose, identity.certificate, identity.key, identity.authorities)


def _context(purpose: int, certificate: bytes, key: bytes, authorities: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(purpose)
    with _as_file(certificate) as first, _as_file(key) as second:
        context.load_cert_chain(first, second, password=_no_password)
    context.load_verify_locations(cadata=authorities.decode("ascii"))
    return context


def _no_password() -> str:
    """Otherwise OpenSSL would ask the terminal."""
    raise ValueError(f"{KEY} wants a password: it has to be without one")


@contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """In memory only. The standard library takes certificates and keys from files."""
    fd = os.memfd_create("pem")
    try:
        os.write(fd, data)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def _use(certificate: bytes, key: bytes, authorities: bytes) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(what the certificate says, digests of the CAs). Raises ssl.SSLError, ValueError."""
    server = _context(ssl.PROTOCOL_TLS_SERVER, certificate, key, authorities)
    client = _context(ssl.PROTOCOL_TLS_CLIENT, certificate, key, authorities)
    client.check_hostname = False
    client.verify_flags |= _ANY_TIME
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True))
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    told: dict[str, Any] | None = ends[0].getpeercert()
    if not told:
        raise ValueError("no handshake came about")
    digests = sorted(hashlib.sha256(der).hexdigest()[:16] for der in client.get_ca_certs(binary_form=True))
    return told, tuple(digests)
