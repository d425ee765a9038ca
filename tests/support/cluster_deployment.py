"""A ModelDeployment in a control plane of the tests, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from cluster_client import ClusterClient
from operator_cluster import manifest, with_tag

from sluice_operator.api.crd import API_VERSION, KIND
from sluice_operator.live.cluster import KINDS
from sluice_operator.names import LABEL_DEPLOYMENT, READINESS_GATE

# Not how long it takes: when to stop waiting, on a machine that is busy with other things too.
READY_S = 240.0
T = TypeVar("T")


class Served:
    """`name` in `namespace`. Its model is in the image, so that pods want no claim."""

    def __init__(self, client: ClusterClient, namespace: str, name: str = "m") -> None:
        self.client, self.namespace, self.name = client, namespace, name
        self.path = KINDS[KIND].path(namespace, name)

    def create(self, **changes: Any) -> str:
        """Its uid."""
        spec = manifest(model={"uri": "image:///models/tiny"}, gateway={"replicas": 1}) | changes
        body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": self.name}, "spec": spec}
        made: str = self.client.create(KINDS[KIND].path(self.namespace), body)["metadata"]["uid"]
        return made

    def change(self, **spec: Any) -> None:
        self.client.merge(self.path, {"spec": spec})

    def roll_to(self, tag: str) -> None:
        self.change(image=with_tag(tag))

    def delete(self) -> None:
        self.client.delete(self.path)

    def condition(self, kind: str) -> dict[str, str]:
        there = self.client.get(self.path)
        return condition(there, kind)

    def status(self) -> Any:
        return self.client.get(self.path)["status"]

    def until_status(self, is_so: Callable[[Any], T], timeout_s: float = READY_S) -> T:
        """What `is_so` says of the status, once that is true."""
        return self.client.until(self.path, lambda there: is_so(there.get("status", {})), timeout_s)

    def until(self, kind: str, status: str, reason: str = "", timeout_s: float = READY_S) -> dict[str, str]:
        """The condition, once it is so for the present spec."""

        def told(there: Any) -> dict[str, str]:
            found = condition(there, kind)
            fresh = found.get("observedGeneration") == there["metadata"]["generation"]
            return found if fresh and found["status"] == status and reason in ("", found["reason"]) else {}

        return self.client.until(self.path, told, timeout_s)

    def until_served(self, tag: str, timeout_s: float = READY_S) -> None:
        """All engine pods are of that image, and the rollout is complete."""
        self.until("Progressing", "True", "Complete", timeout_s)
        self.until("Ready", "True", timeout_s=timeout_s)
        # A Deployment that was told to shrink to nothing still has to do it.
        wanted = {f"registry.local/sluice-engine:{tag}"}
        self.until_children("Pod", lambda pods: {image_of(pod) for pod in pods if is_engine(pod)} == wanted)

    def until_quoted(self, words: str, timeout_s: float = READY_S) -> list[str]:
        """What status quotes of the scheduler, once `words` are among it."""

        def told(there: Any) -> list[str]:
            reasons = there.get("status", {}).get("placement", {}).get("reasons", [])
            return [reason for reason in reasons if words in reason]

        return self.client.until(self.path, told, timeout_s)

    def children(self, *kinds: str) -> Iterator[Any]:
        for kind in kinds:
            query = f"?labelSelector={LABEL_DEPLOYMENT}={self.name}"
            yield from self.client.items(KINDS[kind].path(self.namespace) + query)

    def engines(self) -> list[Any]:
        return [pod for pod in self.children("Pod") if is_engine(pod)]

    def fail_readiness(self, pod: str) -> None:
        """Its readiness probe fails from now on; kwok leaves a container alone whose readiness is not known."""
        told = {"status": {"conditions": [{"type": "ContainersReady", "status": "Unknown"}]}}
        path = f"{KINDS['Pod'].path(self.namespace, pod)}/status"
        self.client.call("PATCH", path, told, "application/strategic-merge-patch+json")

    def until_children(self, kind: str, is_so: Callable[[list[Any]], T], timeout_s: float = READY_S) -> T:
        path = f"{KINDS[kind].path(self.namespace)}?labelSelector={LABEL_DEPLOYMENT}={self.name}"
        return self.client.until(path, lambda there: is_so(there["items"]), timeout_s)


def condition(item: Any, kind: str) -> dict[str, str]:
    """{} while nobody has said anything."""
    found = [c for c in item.get("status", {}).get("conditions", ()) if c["type"] == kind]
    return found[0] if found else {}


def image_of(pod: Any) -> str:
    image: str = pod["spec"]["containers"][0]["image"]
    return image


def is_engine(pod: Any) -> bool:
    """One that is not going."""
    return pod["metadata"]["labels"]["sluice.dev/role"] != "gateway" and not is_ending(pod)


def is_scheduled(pod: Any) -> bool:
    return bool(pod["spec"].get("nodeName"))


def gate_of(pods: list[Any], name: str) -> str:
    """Status of the readiness gate of the pod `name`; empty while nobody has written it."""
    found = [pod for pod in pods if pod["metadata"]["name"] == name]
    return condition(found[0], READINESS_GATE).get("status", "") if found else ""


def is_ending(item: Any) -> bool:
    return "deletionTimestamp" in item["metadata"]


def uids(items: Any) -> set[str]:
    return {item["metadata"]["uid"] for item in items}
