"""What is in a namespace, an object a line: for whoever reads why a test has failed."""

from __future__ import annotations

import json
from typing import Any

from cluster_client import ClusterClient

from sluice_operator.live.cluster import KINDS

TOLD = ("ModelDeployment", "Deployment", "ReplicaSet", "Pod")
MOST = 2_500  # characters of one object


def state_of(client: ClusterClient, namespace: str) -> str:
    """Never raises: the failure itself must be told, whatever has become of the API server."""
    try:
        return "\n".join(_line(kind, item) for kind in TOLD for item in client.items(KINDS[kind].path(namespace)))
    except Exception as error:
        return f"cannot be read: {error!r}"


def _line(kind: str, item: dict[str, Any]) -> str:
    meta = {key: told for key, told in item["metadata"].items() if key not in ("managedFields", "namespace", "uid")}
    spec = item.get("spec", {})
    if kind in ("Deployment", "ReplicaSet"):
        spec = {"replicas": spec.get("replicas")}
    elif kind == "Pod":
        spec = {"nodeName": spec.get("nodeName")}
    said = json.dumps({"status": item.get("status"), "spec": spec, "metadata": meta})
    return f"{kind} {meta['name']}: {said[:MOST]}"
