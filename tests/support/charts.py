"""The charts, rendered by helm; `python charts.py` writes the golden files anew."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import yaml
from cluster_tools import TOOLS

ROOT = Path(__file__).parents[2]
CHARTS = ROOT / "charts"
GOLDEN = ROOT / "tests" / "cluster" / "golden"
IMAGE = ("--set-string", "image.repository=registry.local/sluice-control,image.tag=1")
# Name -> values: every branch of the templates in one of them.
VARIANTS: dict[str, tuple[str, ...]] = {
    "default": (),
    "all-namespaces": ("--set", "watch.allNamespaces=true,nodes.read=true,podMonitor.allow=true"),
    "monitored": (
        *("--set", "monitoring.podMonitor=true,monitoring.rules=true,monitoring.dashboards=true"),
        *("--set-string", "monitoring.labels.release=prometheus", "--set", "networkPolicy.create=false"),
    ),
    "platform": (
        *("--set", "fullnameOverride=serving,serviceAccount.name=sluice-sa,logLevel=debug,pods.runAsUser=null"),
        *("--set", "networkPolicy.dnsPorts={53,5353},podDisruptionBudget.maxUnavailable=2,replicas=3"),
        *("--set", "podSecurityContext.runAsUser=null,podSecurityContext.runAsGroup=null"),
        *("--set", "securityContext.privileged=false,terminationGracePeriodSeconds=60,monitoring.serviceMonitor=true"),
        *(
            "--set-string",
            "labels.team=search,annotations.cost=42,podLabels.tier=control,serviceAccount.annotations.a=b",
        ),
        *("--set-json", 'extraEnv=[{"name":"HTTPS_PROXY","value":"http://proxy:3128"}]'),
        *(
            "--set-json",
            'topologySpreadConstraints=[{"maxSkew":1,"topologyKey":"zone","whenUnsatisfiable":"DoNotSchedule"}]',
        ),
        *(
            "--set-json",
            'extraObjects=[{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"{{ .Release.Name }}-x"}}]',
        ),
    ),
    "foreign-rights": ("--set", "serviceAccount.create=false,rbac.create=false,podDisruptionBudget.create=false"),
    "two-namespaces": (
        *("--set", "watch.namespaces={a,b},replicas=1,image.pullSecrets={registry},priorityClassName=high"),
        *("--set-string", "podAnnotations.a=b,nodeSelector.pool=system"),
        *("--set-json", 'tolerations=[{"operator":"Exists"}]', "--set-json", 'affinity={"podAntiAffinity":{}}'),
    ),
}


def helm(*words: str, kubeconfig: Path | None = None, fails: bool = False) -> str:
    """stdout, or both streams if it is meant to fail; AssertionError when it ends otherwise than expected."""
    where = [f"--kubeconfig={kubeconfig}"] if kubeconfig is not None else []
    environment = {"PATH": os.environ["PATH"], "HOME": str(kubeconfig.parent if kubeconfig is not None else "/nowhere")}
    command = [str(TOOLS["helm"].path), *words, *where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert (done.returncode != 0) is fails, f"helm {' '.join(words)}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr if fails else done.stdout


def render(*values: str, namespace: str = "sluice") -> str:
    return helm("template", "sluice", str(CHARTS / "sluice"), f"--namespace={namespace}", *IMAGE, *values)


def objects(*values: str, namespace: str = "sluice") -> list[dict[str, Any]]:
    return [item for item in yaml.safe_load_all(render(*values, namespace=namespace)) if item]


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for variant, chosen in VARIANTS.items():
        (GOLDEN / f"{variant}.yaml").write_text(render(*chosen))
