"""How to reach the API server, and as whom: from a kubeconfig, or from what a pod finds in itself."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from sluice_runtime.cluster_connection import Connection, ConnectionInvalid, from_pod

__all__ = ["Connection", "ConnectionInvalid", "from_kubeconfig", "from_pod"]


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
