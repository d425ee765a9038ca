"""Certificates of a control plane that lives for minutes: one CA, P-256 keys, everything for loopback."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

LIFETIME = datetime.timedelta(days=1)


class Authority:
    """Writes NAME.crt and NAME.key into `folder`; `ca.crt` signs them all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("sluice-test-ca", "")
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        ca = _builder(self._name, self._name, self._key).add_extension(constraints, critical=True)
        self._write("ca", ca.sign(self._key, hashes.SHA256()), self._key)

    def issue(self, file: str, common_name: str, organization: str = "") -> None:
        """For servers on 127.0.0.1 and localhost, and for clients: `organization` is the client's group."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.IPAddress(ipaddress.IPv4Address("127.0.0.1")), x509.DNSName("localhost")]
        names += [x509.DNSName(f"kubernetes.default{suffix}") for suffix in ("", ".svc")]
        builder = _builder(_name(common_name, organization), self._name, key)
        signed = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        self._write(file, signed.sign(self._key, hashes.SHA256()), key)

    def service_account_key(self) -> None:
        """sa.key and sa.pub."""
        key = ec.generate_private_key(ec.SECP256R1())
        (self.folder / "sa.key").write_bytes(_private(key))
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        public = key.public_key().public_bytes(serialization.Encoding.PEM, form)
        (self.folder / "sa.pub").write_bytes(public)

    def _write(self, file: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        (self.folder / f"{file}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        (self.folder / f"{file}.key").write_bytes(_private(key))


def _name(common_name: str, organization: str) -> x509.Name:
    told = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    if organization:
        told.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
    return x509.Name(told)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + LIFETIME)
    )


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    form, secret = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, form, secret)
