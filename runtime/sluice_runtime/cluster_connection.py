"""How to reach the Kubernetes API server, and with which identity: from what a pod finds in itself. For operator and
gateway."""

from __future__ import annotations

import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class ConnectionInvalid(Exception):
    """A kubeconfig, or what should be in a pod, cannot be used; the message names the file and the field."""


@dataclass(frozen=True, slots=True)
class Connection:
    """`server`: a URL. `ca`, `certificate`, `key`: PEM, empty if not used. `namespace`: the context's own.

    `token_file`: read anew for each request, for a pod's token is replaced while it runs."""

    server: str
    ca: str = ""
    certificate: str = ""
    key: str = ""
    token: str = ""
    token_file: Path | None = None
    namespace: str = "default"

    def bearer(self) -> str:
        """Empty with a client certificate. Raises OSError."""
        return self.token_file.read_text().strip() if self.token_file is not None else self.token

    def tls(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=self.ca or None)
        if self.certificate:
            # The standard library takes a private key from a file only.
            with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
                file.write(self.certificate + "\n" + self.key)
                file.flush()
                context.load_cert_chain(file.name)
        return context


def from_pod(host: str, port: str, folder: Path = SERVICE_ACCOUNT) -> Connection:
    """`host`, `port`: KUBERNETES_SERVICE_HOST and _PORT. Raises ConnectionInvalid."""
    if not host or not port:
        raise ConnectionInvalid("no --kubeconfig, and KUBERNETES_SERVICE_HOST is not set: this is no pod")
    try:
        namespace, ca = (folder / "namespace").read_text().strip(), (folder / "ca.crt").read_text()
    except OSError as error:
        raise ConnectionInvalid(f"{error}: let the pod have its service account's token") from error
    name = f"[{host}]" if ":" in host else host
    return Connection(f"https://{name}:{port}", ca, token_file=folder / "token", namespace=namespace)
