"""An API server that knows EndpointSlices and nothing else, over TLS, for pods that run outside of a cluster."""

from __future__ import annotations

import ipaddress
import json
import ssl
import threading
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from sluice_operator.keys.certificates import Authority


def endpoint_slice(service: str, addresses: Iterable[str], port: int) -> dict[str, Any]:
    """Of a headless Service's pods, as the controller manager writes it."""
    endpoints = [
        {"addresses": [address], "conditions": {"ready": True, "serving": True}, "targetRef": {"uid": f"uid-{address}"}}
        for address in addresses
    ]
    return {
        "metadata": {"name": f"{service}-1", "resourceVersion": "1", "labels": {"kubernetes.io/service-name": service}},
        "addressType": "IPv4",
        "ports": [{"name": "engine", "port": port, "protocol": "TCP"}],
        "endpoints": endpoints,
    }


class FakeApi:
    """Lists `slices` to who brings `token`; its watches say nothing until it is left. `asked`: (path, query) so far."""

    def __init__(self, host: str, authority: Authority, token: str, slices: list[dict[str, Any]], folder: Path) -> None:
        self.host = host
        self.asked: list[tuple[str, Mapping[str, list[str]]]] = []
        self._ended = threading.Event()
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                url = urlsplit(self.path)
                query = parse_qs(url.query)
                api.asked.append((url.path, query))
                if self.headers.get("Authorization") != f"Bearer {token}":
                    self._send(401, {"message": "who are you?"})
                elif not url.path.endswith("/endpointslices"):
                    self._send(404, {"message": f"nothing at {url.path}"})
                elif "watch" in query:
                    self.send_response(200)
                    self.send_header("Connection", "close")
                    self.end_headers()
                    self.wfile.flush()
                    api._ended.wait(float(query["timeoutSeconds"][0]))
                    self.close_connection = True
                else:
                    self._send(200, {"metadata": {"resourceVersion": "1"}, "items": slices})

            def _send(self, status: int, told: object) -> None:
                body = json.dumps(told).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer((host, 0), Handler)
        self._server.daemon_threads = True
        self._server.socket = _tls(host, authority, folder).wrap_socket(self._server.socket, server_side=True)
        self.port: int = self._server.server_address[1]

    @property
    def environment(self) -> dict[str, str]:
        """What the kubelet tells every pod."""
        return {"KUBERNETES_SERVICE_HOST": self.host, "KUBERNETES_SERVICE_PORT": str(self.port)}

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()


def _tls(host: str, authority: Authority, folder: Path) -> ssl.SSLContext:
    """A server certificate for an address, by the CA that pods find beside their token."""
    signer = serialization.load_pem_private_key(authority.key, None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(x509.load_pem_x509_certificate(authority.certificate).subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))]), critical=True)
        .sign(signer, hashes.SHA256())
    )
    pem = folder / "api.pem"
    form, secret = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem.write_bytes(
        certificate.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, form, secret)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    return context
