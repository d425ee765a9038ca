"""How to reach the API server, and as whom: from a kubeconfig, or from what a pod finds in itself."""

from __future__ import annotations

import base64
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class ConnectionInvalid(Exception):
    """The kubeconfig, or what should be in a pod, cannot be used; the message names the file and the field."""


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


def from_kubeconfig(path: Path) -> Connection:
    """Of the current context. Raises ConnectionInvalid; a user that calls programs (exec) is not supported."""
    try:
        told = yaml.safe_load(path.read_text())
        context = _named(told, "contexts", told["current-context"])["context"]
        cluster = _named(told, "clusters", context["cluster"])["cluster"]
        user = _named(told, "users", context["user"])["user"]
        connection = Connection(
            server=cluster["server"],
            ca=_pem(cluster, "certificate-authority", path.parent),
            certificate=_pem(user, "client-certificate", path.parent),
            key=_pem(user, "client-key", path.parent),
            token=user.get("token", ""),
            token_file=Path(user["tokenFile"]) if "tokenFile" in user else None,
            namespace=context.get("namespace", "default"),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise ConnectionInvalid(f"{path}: {error!r}") from error
    if not (connection.certificate or connection.token or connection.token_file):
        raise ConnectionInvalid(f"{path}: user {context['user']!r} has neither certificate nor token: give one of them")
    return connection


def _named(told: Mapping[str, Any], kind: str, name: str) -> Mapping[str, Any]:
    for item in told[kind]:
        if item["name"] == name:
            found: Mapping[str, Any] = item
            return found
    raise KeyError(f"{kind}: no {name!r}")


def _pem(part: Mapping[str, Any], name: str, folder: Path) -> str:
    if f"{name}-data" in part:
        return base64.b64decode(part[f"{name}-data"]).decode()
    return (folder / part[name]).read_text() if name in part else ""
