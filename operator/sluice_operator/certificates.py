"""Certificates of one ModelDeployment: a CA of its own, and a leaf per role. P-256, PEM, as TLS Secrets have them.

A leaf names deployment and role, not an address: peers dial pod addresses and expect that name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_LIFE, LEAF_LIFE = timedelta(days=3650), timedelta(days=365)
# Clocks of nodes differ.
SLACK = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Issued:
    """PEM. `authority`: the certificate of whoever signed it, of itself for a CA."""

    certificate: bytes
    key: bytes
    authority: bytes

    def data(self) -> dict[str, bytes]:
        """Of a Secret."""
        return {"tls.crt": self.certificate, "tls.key": self.key, "ca.crt": self.authority}

    @classmethod
    def read(cls, data: Mapping[str, bytes]) -> Issued:
        """Raises KeyError for a Secret that is none of ours."""
        return cls(data["tls.crt"], data["tls.key"], data["ca.crt"])


def server_name(role: str, name: str, namespace: str) -> str:
    """What a client expects its peer's certificate to say."""
    return f"{role}.{name}.{namespace}.sluice.dev"


def new_authority(name: str, namespace: str, now: datetime | None = None) -> Issued:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(f"{name}.{namespace}.sluice.dev")
    builder = _builder(subject, subject, key, now, AUTHORITY_LIFE)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    signed = _pem(builder.sign(key, hashes.SHA256()))
    return Issued(signed, _private(key), signed)


def issue(authority: Issued, role: str, name: str, namespace: str, now: datetime | None = None) -> Issued:
    """For servers and clients of that role."""
    signer = serialization.load_pem_private_key(authority.key, None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    issuer = x509.load_pem_x509_certificate(authority.certificate).subject
    key = ec.generate_private_key(ec.SECP256R1())
    host = server_name(role, name, namespace)
    usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    builder = (
        _builder(_name(role), issuer, key, now, LEAF_LIFE)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(usages, critical=False)
    )
    return Issued(_pem(builder.sign(signer, hashes.SHA256())), _private(key), authority.certificate)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime | None, life: timedelta
) -> x509.CertificateBuilder:
    start = now if now is not None else datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start - SLACK)
        .not_valid_after(start + life)
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    form, secret = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, form, secret)
