"""The control plane's binaries, built from Go modules that tests/cluster/modules pins; `python cluster_tools.py` builds
what is missing (9 minutes cold, on 2 cores) with the Go on PATH, or else the one in /usr/local/go.

They lie outside the tree in ~/.cache/sluice-kind/bin, in a folder per module whose name changes with what is pinned.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

MODULES = Path(__file__).parent.parent / "cluster" / "modules"
CACHE = Path.home() / ".cache" / "sluice-kind" / "bin"
KUBERNETES_VERSION = "v1.34.0"
BUILD_TIMEOUT_S = 3600.0
USUAL_GO = Path("/usr/local/go/bin/go")

NO_GO = f"there is no Go on PATH, nor {USUAL_GO}: install Go 1.26 (https://go.dev/dl), then `make cluster-tools`"

_VERSION = "k8s.io/component-base/version"
# As a module, Kubernetes does not know its own version, and an API server without one refuses CRDs.
_KUBERNETES_FLAGS = " ".join(
    f"-X {_VERSION}.{name}={value}"
    for name, value in {
        "gitVersion": KUBERNETES_VERSION,
        "gitMajor": "1",
        "gitMinor": "34",
        "gitTreeState": "clean",
        "gitCommit": "0" * 40,
    }.items()
)
# Without a cluster, helm renders for the Kubernetes that it was told of when it was built.
_HELM_FLAGS = " ".join(
    f"-X helm.sh/helm/v3/pkg/{package}.k8sVersion{part}={value}"
    for package in ("chartutil", "lint/rules")
    for part, value in (("Major", "1"), ("Minor", "34"))
)


@dataclass(frozen=True, slots=True)
class Tool:
    """`module`: folder of its go.mod. `package`: what is built."""

    name: str
    module: str
    package: str
    flags: str = ""

    @property
    def path(self) -> Path:
        pinned = b"".join((MODULES / self.module / name).read_bytes() for name in ("go.mod", "go.sum"))
        key = hashlib.sha256(pinned + self.flags.encode()).hexdigest()[:12]
        return CACHE / f"{self.module}-{key}" / self.name


TOOLS = {
    tool.name: tool
    for tool in (
        Tool("etcd", "etcd", "go.etcd.io/etcd/server/v3"),
        *(
            Tool(name, "kubernetes", f"k8s.io/kubernetes/cmd/{name}", _KUBERNETES_FLAGS)
            for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
        ),
        Tool("kwok", "kwok", "sigs.k8s.io/kwok/cmd/kwok"),
        Tool("helm", "helm", "helm.sh/helm/v3/cmd/helm", _HELM_FLAGS),
    )
}


def missing() -> list[Tool]:
    return [tool for tool in TOOLS.values() if not tool.path.exists()]


def find_go() -> str | None:
    return shutil.which("go") or (str(USUAL_GO) if os.access(USUAL_GO, os.X_OK) else None)


def why_missing() -> str:
    """Empty when every binary is there, else what to do about it."""
    names = ", ".join(tool.name for tool in missing())
    if not names:
        return ""
    remedy = "`make cluster-tools` builds them" if find_go() else NO_GO
    return f"the test control plane lacks {names}: {remedy}"


def build(tool: Tool, go: str) -> None:
    """Raises CalledProcessError with the compiler's words on stderr."""
    path = tool.path
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another session may build the same: each has its own file, and the last one wins.
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    command = [go, "build", "-trimpath", "-buildvcs=false", f"-ldflags=-s -w {tool.flags}", "-o", str(fresh)]
    environment = os.environ | {"CGO_ENABLED": "0", "GOWORK": "off"}
    try:
        subprocess.run(
            [*command, tool.package], cwd=MODULES / tool.module, env=environment, check=True, timeout=BUILD_TIMEOUT_S
        )
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    go = find_go()
    if go is None and missing():
        print(why_missing(), file=sys.stderr)
        return 1
    for tool in missing():
        began = time.monotonic()
        build(tool, str(go))
        print(f"{tool.name} {time.monotonic() - began:.0f} s -> {tool.path}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
