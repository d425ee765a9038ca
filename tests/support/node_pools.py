"""Twelve node pools as a cloud has them, and what is asked of each: real nodes of an API server without machines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MAJOR, PRODUCT, CLIQUE = "nvidia.com/gpu.compute.major", "nvidia.com/gpu.product", "nvidia.com/gpu.clique"
GPU, POOL = "nvidia.com/gpu", "sluice.test/pool"
RTX = "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition"


def node(pool: str, name: str = "", major: int = 0, product: str = "", gpus: int = 8, **more: Any) -> dict[str, Any]:
    """`major` 0: GPU Feature Discovery has not labelled it. `more`: labels, taints, cordoned, down."""
    labels = {POOL: pool} | ({MAJOR: str(major), PRODUCT: product} if major else {}) | more.get("labels", {})
    sizes = {"cpu": "64", "memory": "1Ti", "pods": "100"} | ({GPU: str(gpus)} if gpus else {})
    meta: dict[str, Any] = {"name": f"pool-{name or pool}", "labels": labels}
    status: dict[str, Any] = {"allocatable": sizes, "capacity": sizes}
    if more.get("down"):
        meta["annotations"] = {"sluice.test/down": "true"}
        status["conditions"] = [{"type": "Ready", "status": "False", "reason": "KubeletNotReady", "message": "down"}]
    spec = {"taints": more.get("taints", []), "unschedulable": bool(more.get("cordoned"))}
    return {"apiVersion": "v1", "kind": "Node", "metadata": meta, "spec": spec, "status": status}


DEDICATED = {"key": GPU, "value": "present", "effect": "NoSchedule"}
POOLS = (
    node("hopper", major=9, product="NVIDIA-H100-80GB-HBM3"),
    node("b200", major=10, product="NVIDIA-B200"),
    node("gb200", major=10, product="NVIDIA-GB200", gpus=4, labels={CLIQUE: "rack-1.0"}),
    node("rtx", major=12, product=RTX),
    node("mixed", "mixed-b200", major=10, product="NVIDIA-B200"),
    node("mixed", "mixed-l40s", major=8, product="NVIDIA-L40S"),
    node("tainted", major=10, product="NVIDIA-B200", taints=[DEDICATED]),
    node("avoided", major=10, product="NVIDIA-B200", taints=[{"key": "old", "effect": "PreferNoSchedule"}]),
    node("full", major=10, product="NVIDIA-B200"),
    node("cordoned", major=10, product="NVIDIA-B200", cordoned=True),
    node("down", major=10, product="NVIDIA-B200", down=True),
    node("no-gfd"),
    node("cpu", gpus=0),
)


@dataclass(frozen=True)
class Case:
    """A ModelDeployment that may go to the nodes of one pool only. `refusal`: why its nodes cannot be used,
    empty if one of them will do; `scheduler`: what the scheduler says then."""

    name: str
    pool: str
    refusal: str = ""
    scheduler: str = ""
    gpu: dict[str, Any] = field(default_factory=lambda: {"computeMajor": [10, 12]})
    pod: dict[str, Any] = field(default_factory=dict)

    @property
    def spec(self) -> dict[str, Any]:
        template = {"spec": {"nodeSelector": {POOL: self.pool}} | self.pod}
        return {
            "accelerator": {"type": "GPU", "gpu": self.gpu},
            "prefill": {"replicas": 1, "template": template},
            "decode": {"replicas": 1, "template": template},
        }


def requires(key: str, operator: str, *values: str) -> dict[str, Any]:
    """A pod spec's node affinity with one requirement."""
    terms = [{"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}]
    node_affinity = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return {"affinity": {"nodeAffinity": node_affinity}}


AFFINITY = "didn't match Pod's node affinity/selector"
TOLERATES = {"tolerations": [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]}
CASES = (
    Case("hopper", "hopper", "compute major is not one of 10, 12", AFFINITY),
    Case("b200", "b200"),
    Case("gb200", "gb200", gpu={"products": ["NVIDIA-GB200"]}),
    Case("rtx", "rtx"),
    Case("rtx-not-b200", "rtx", "compute major is not 10", AFFINITY, {"computeMajor": [10]}),
    Case("mixed", "mixed"),
    Case("mixed-no-hopper", "mixed", "compute major is not 9", AFFINITY, {"computeMajor": [9]}),
    Case("tainted", "tainted", f"taint {GPU} is not tolerated", "had untolerated taint"),
    Case("tolerated", "tainted", pod=TOLERATES),
    Case("avoided", "avoided"),
    Case("full", "full", "no free GPU", f"Insufficient {GPU}"),
    Case("cordoned", "cordoned", "cordoned", "were unschedulable"),
    Case("cordoned-tolerated", "cordoned", pod={"tolerations": [{"operator": "Exists"}]}),
    Case("down", "down", "not Ready", "had untolerated taint"),
    Case("no-gfd", "no-gfd", "no labels of GPU Feature Discovery", AFFINITY),
    Case("no-gfd-any", "no-gfd", gpu={}),
    Case("cpu", "cpu", f"no {GPU}", f"Insufficient {GPU}", {}),
    Case("zone", "b200", "the template's node affinity is not met", AFFINITY, pod=requires("zone", "In", "a")),
    Case("not-l40s", "mixed", gpu={}, pod=requires(PRODUCT, "NotIn", "NVIDIA-L40S")),
    Case("clique", "b200", f"no label {CLIQUE}", "didn't match pod affinity rules",
         {"domain": {"policy": "Required"}}),
)  # fmt: skip
