"""Certificates of one ModelDeployment: a CA of its own, and a leaf per role. P-256, PEM, as TLS Secrets have them.

A leaf names deployment and role, not an address: peers dial pod addresses and expect that name. Nothing here looks at
a clock or decides anything: that is `rotation`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from sluice_runtime.tls.peers import ENGINES, Peer

# Of every certificate: a clock that once ran ahead must not make any that nobody accepts yet (ADR 0087).
BEGIN = datetime(2020, 1, 1, tzinfo=UTC)
LATEST = datetime(9999, 1, 1, tzinfo=UTC)
CERTIFICATE, KEY, AUTHORITIES = "tls.crt", "tls.key", "ca.crt"
NEXT_CERTIFICATE, NEXT_KEY = "next.crt", "next.key"


class NotOurs(ValueError):
    """What a Secret holds was not issued here, or not for that; the message says what is wrong."""


@dataclass(frozen=True, slots=True)
class Issued:
    """PEM. `authorities`: of all CAs that its holder trusts."""

    certificate: bytes
    key: bytes
    authorities: bytes

    def data(self) -> dict[str, bytes]:
        """Of a Secret."""
        return {CERTIFICATE: self.certificate, KEY: self.key, AUTHORITIES: self.authorities}


@dataclass(frozen=True, slots=True)
class Authority:
    """A CA with its key, PEM. `id`: as Identity.trusted has it. `not_after`: Unix time."""

    certificate: bytes
    key: bytes
    id: str
    not_after: float


@dataclass(frozen=True, slots=True)
class Authorities:
    """What the CA's Secret holds: who signs, and while it is being replaced, who will."""

    current: Authority
    next: Authority | None = None

    def data(self) -> dict[str, bytes]:
        told = {CERTIFICATE: self.current.certificate, KEY: self.current.key, AUTHORITIES: self.current.certificate}
        return told if self.next is None else told | {NEXT_CERTIFICATE: self.next.certificate, NEXT_KEY: self.next.key}

    def by_id(self, id_: str) -> Authority | None:
        return next((a for a in (self.current, self.next) if a is not None and a.id == id_), None)


@dataclass(frozen=True, slots=True)
class Leaf:
    """What a role's Secret holds. `issuer`: id of one of `trusted`, which are PEM by id. `not_after`: Unix time."""

    issuer: str
    not_after: float
    trusted: Mapping[str, bytes]


def server_name(role: str, name: str, namespace: str) -> str:
    """What a client expects its peer's certificate to say."""
    return f"{role}.{name}.{namespace}.sluice.dev"


def server_names(role: str, name: str, namespace: str) -> list[str]:
    """Of a leaf: its role first."""
    roles = (role, Peer.ENGINE.value) if role in ENGINES else (role,)
    return [server_name(each, name, namespace) for each in roles]


def new_authority(name: str, namespace: str, not_after: float) -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    # Like no other's: with two of one name in a bundle, whoever verifies takes the first and says "bad signature".
    subject = _name(f"sluice {serial:040x} {name}.{namespace}")
    builder = _builder(subject, subject, key, serial, not_after)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs=True), critical=True)
    signed = builder.add_extension(_key_id(key.public_key()), critical=False).sign(key, hashes.SHA256())
    return Authority(_pem(signed), _private(key), _id(signed), signed.not_valid_after_utc.timestamp())


def issue(
    signer: Authority, trusted: Iterable[bytes], role: str, name: str, namespace: str, not_after: float
) -> Issued:
    """For servers and clients of that role. It never outlives who signed it."""
    signing = serialization.load_pem_private_key(signer.key, None)
    assert isinstance(signing, ec.EllipticCurvePrivateKey)
    parent = x509.load_pem_x509_certificate(signer.certificate)
    key = ec.generate_private_key(ec.SECP256R1())
    until = min(not_after, signer.not_after)
    usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    hosts = x509.SubjectAlternativeName([x509.DNSName(host) for host in server_names(role, name, namespace)])
    signed = (
        _builder(_name(role), parent.subject, key, x509.random_serial_number(), until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(hosts, critical=False)
        .add_extension(usages, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier(_key_id(signing.public_key()).digest, None, None), critical=False)
        .sign(signing, hashes.SHA256())
    )
    return Issued(_pem(signed), _private(key), b"".join(trusted))


def read_authorities(data: Mapping[str, bytes]) -> Authorities:
    """From the CA's Secret. One that is to come and makes no sense is as if it were not there. Raises NotOurs."""
    current = _read_authority(data.get(CERTIFICATE, b""), data.get(KEY, b""))
    if NEXT_CERTIFICATE not in data:
        return Authorities(current)
    try:
        return Authorities(current, _read_authority(data[NEXT_CERTIFICATE], data.get(NEXT_KEY, b"")))
    except NotOurs:
        return Authorities(current)


def read_leaf(data: Mapping[str, bytes], role: str, name: str, namespace: str) -> Leaf:
    """From a role's Secret. Raises NotOurs."""
    certificate = _certificate(data.get(CERTIFICATE, b""), CERTIFICATE)
    _check_key(certificate, data.get(KEY, b""), KEY)
    try:
        bundle = x509.load_pem_x509_certificates(data.get(AUTHORITIES, b""))
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        told = names.get_values_for_type(x509.DNSName)
    except (ValueError, x509.ExtensionNotFound) as error:
        raise NotOurs(f"{AUTHORITIES} or the names in {CERTIFICATE}: {error}") from error
    if told != server_names(role, name, namespace):
        raise NotOurs(f"{CERTIFICATE} is of {told}")
    issuer = next((authority for authority in bundle if _has_signed(authority, certificate)), None)
    if issuer is None:
        raise NotOurs(f"{CERTIFICATE} is signed by none of {AUTHORITIES}")
    trusted = {_id(authority): _pem(authority) for authority in bundle}
    return Leaf(_id(issuer), certificate.not_valid_after_utc.timestamp(), trusted)


def _read_authority(certificate: bytes, key: bytes) -> Authority:
    told = _certificate(certificate, "the CA")
    _check_key(told, key, "the CA's key")
    if not _has_signed(told, told):
        raise NotOurs("the CA is not signed by itself")
    return Authority(_pem(told), key, _id(told), told.not_valid_after_utc.timestamp())


def _certificate(pem: bytes, what: str) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise NotOurs(f"{what}: {error}") from error


def _check_key(certificate: x509.Certificate, pem: bytes, what: str) -> None:
    try:
        key = serialization.load_pem_private_key(pem, None)
        fits = key.public_key() == certificate.public_key()
    except (ValueError, TypeError) as error:  # TypeError: it wants a password
        raise NotOurs(f"{what}: {error}") from error
    if not fits or not isinstance(key, ec.EllipticCurvePrivateKey):
        raise NotOurs(f"{what} is not that of the certificate")


def _has_signed(issuer: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _id(certificate: x509.Certificate) -> str:
    return hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).hexdigest()[:16]


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, serial: int, not_after: float
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(BEGIN)
        .not_valid_after(_moment(not_after))
    )


def _moment(at: float) -> datetime:
    """As far as certificates can count."""
    lasts = min(max(at, BEGIN.timestamp() + 1), LATEST.timestamp())
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=int(lasts))


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=signs, crl_sign=signs, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _key_id(key: ec.EllipticCurvePublicKey) -> x509.SubjectKeyIdentifier:
    return x509.SubjectKeyIdentifier.from_public_key(key)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    form, secret = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, form, secret)
