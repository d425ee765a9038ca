"""A real Kubernetes control plane for tests: etcd, API server, controller manager, scheduler, and kwok for nodes and
pods that only exist in the API. Loopback only, ports picked by the system, several side by side.

Every process dies with the one that started it (PR_SET_PDEATHSIG) and is ended by its own pid.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml
from audit_log import AuditLog, Request, policy
from cluster_client import ClusterClient, Refused
from cluster_tools import TOOLS
from control_plane_pki import Authority

STAGES = Path(__file__).parent.parent / "cluster" / "stages.yaml"
CRD = Path(__file__).parents[2] / "charts/sluice-crds/templates/modeldeployments.yaml"
GROUP = "sluice.dev"
READY_S = 90.0
ENDING_S = 20.0
PORT_ATTEMPTS = 4

# prctl(PR_SET_PDEATHSIG, SIGKILL) outlives exec.
_LAUNCH = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)

# The user of scheduler, controllers and kwok; theirs is most of what is asked, and nobody wants to know of it.
ITSELF = "control-plane"


class ControlPlaneError(Exception):
    """A process of the control plane did not come up, or ended; the message has the end of its log."""


class PortTaken(ControlPlaneError):
    """Somebody took a port between its choice and its use: worth another attempt."""


class ControlPlane:
    """`with ControlPlane(folder) as plane:` - ready when entered, gone when left. `kwok`: run fake nodes and pods.

    `folder` keeps certificates, data, `audit.log` and a log per process.
    """

    def __init__(self, folder: Path, kwok: bool = False) -> None:
        self.folder, self.kwok = folder, kwok
        self.kubeconfig = folder / "kubeconfig"
        self._own_kubeconfig = folder / f"kubeconfig-{ITSELF}"
        self.ready_after_s = 0.0
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ports: dict[str, int] = {}
        self._client: ClusterClient | None = None
        self._audit = AuditLog(folder / "audit.log")

    def __enter__(self) -> Self:
        began = time.monotonic()
        for attempt in range(PORT_ATTEMPTS):
            try:
                self._start()
                break
            except PortTaken:
                self.stop()
                if attempt + 1 == PORT_ATTEMPTS:
                    raise
            except BaseException:
                self.stop()
                raise
        self.ready_after_s = time.monotonic() - began
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._ports['api']}"

    @property
    def pids(self) -> Mapping[str, int]:
        return {name: process.pid for name, process in self._processes.items()}

    def client(self) -> ClusterClient:
        """Of the administrator; closed with the control plane."""
        if self._client is None:
            pki = self.folder
            self._client = ClusterClient(self.url, pki / "ca.crt", pki / "admin.crt", pki / "admin.key")
        return self._client

    def kubectl(self, *words: str, stdin: str = "", fails: bool = False) -> str:
        """stdout, or both streams if it is meant to fail; AssertionError when it ends otherwise than expected."""
        command = [str(TOOLS["kubectl"].path), f"--kubeconfig={self.kubeconfig}", "--request-timeout=30s", *words]
        environment = {"HOME": str(self.folder), "PATH": os.environ["PATH"]}
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, env=environment)
        assert (done.returncode != 0) is fails, f"kubectl {' '.join(words)}: {done.returncode} {done.stderr}"
        return done.stdout + done.stderr if fails else done.stdout

    def user_kubeconfig(self, user: str, url: str = "") -> Path:
        """A kubeconfig of an authenticated `user` who may do what RBAC lets him; `url`: of a proxy before the API."""
        self._authority.issue(f"user-{user}", user)
        path = self.folder / f"kubeconfig-{user}"
        path.write_text(json.dumps(self._kubeconfig(f"user-{user}", url or self.url)))
        return path

    def allow_everything(self, user: str) -> None:
        """Of an earlier operator of that name too."""
        binding = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": f"everything-{user}"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
            "subjects": [{"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}],
        }
        self.kubectl("apply", "-f", "-", stdin=json.dumps(binding))

    def requests(self) -> Sequence[Request]:
        """Everything that users asked so far, in order of completion. Watches are told when they end."""
        return self._audit.requests()

    def end(self, name: str, sig: signal.Signals = signal.SIGKILL) -> None:
        """One process, by its pid, and wait until it is gone."""
        process = self._processes.pop(name)
        process.send_signal(sig)
        process.wait(ENDING_S)

    def wait_until_ended(self, name: str) -> None:
        """Of a process that should not: raises ControlPlaneError when it has."""
        self._until(name, lambda: False)

    def start_etcd(self) -> None:
        port = self._ports["etcd"]
        url = f"http://127.0.0.1:{port}"
        self._run(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
            "--listen-peer-urls=http://127.0.0.1:0",
            "--unsafe-no-fsync",
            "--log-level=warn",
        )

    def start_api(self) -> None:
        pki = self.folder
        audited = self.folder / "audit-policy.yaml"
        audited.write_text(yaml.safe_dump(policy(ITSELF)))
        self._run(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self._ports['etcd']}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._ports['api']}",
            f"--tls-cert-file={pki / 'server.crt'}",
            f"--tls-private-key-file={pki / 'server.key'}",
            f"--client-ca-file={pki / 'ca.crt'}",
            f"--service-account-key-file={pki / 'sa.pub'}",
            f"--service-account-signing-key-file={pki / 'sa.key'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--requestheader-client-ca-file={pki / 'ca.crt'}",
            "--requestheader-allowed-names=front-proxy",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={pki / 'front-proxy.crt'}",
            f"--proxy-client-key-file={pki / 'front-proxy.key'}",
            "--authorization-mode=Node,RBAC",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--endpoint-reconciler-type=none",
            "--allow-privileged",
            f"--audit-policy-file={audited}",
            f"--audit-log-path={self.folder / 'audit.log'}",
            "--audit-log-maxsize=100000",  # MB: else it begins anew at 100
        )
        client = self.client()
        self._until("kube-apiserver", lambda: client.get_text("/readyz") == "ok")

    def start_controllers(self) -> None:
        self._run(
            "kube-controller-manager",
            f"--kubeconfig={self._own_kubeconfig}",
            f"--service-account-private-key-file={self.folder / 'sa.key'}",
            f"--root-ca-file={self.folder / 'ca.crt'}",
            "--use-service-account-credentials",
            "--secure-port=0",
            "--leader-elect=false",
            "--horizontal-pod-autoscaler-sync-period=1s",
        )

    def start_scheduler(self) -> None:
        self._run("kube-scheduler", f"--kubeconfig={self._own_kubeconfig}", "--secure-port=0", "--leader-elect=false")

    def start_kwok(self) -> None:
        # Addresses that are nobody's, should anything ever dial one.
        where = [f"--kubeconfig={self._own_kubeconfig}", f"--config={STAGES}", "--cidr=240.0.0.1/16"]
        self._run("kwok", *where, "--manage-all-nodes=true")

    def restart_api(self) -> None:
        """Nothing of what it had cached is left."""
        self.end("kube-apiserver")
        self.start_api()

    def compact(self) -> None:
        """etcd keeps only what there is now: a watch that would go on from before is told that it cannot."""
        revision = self._etcd("kv/range", {"key": "AA=="})["header"]["revision"]
        self._etcd("kv/compaction", {"revision": revision, "physical": True})

    def install_crd(self) -> None:
        """As a user would, and until everybody knows it."""
        self.kubectl("apply", "-f", str(CRD))
        client = self.client()
        client.until(f"/apis/{GROUP}", bool)
        # What kubectl goes by is put together by controllers of its own.
        client.until("/openapi/v3", lambda told: any(path.startswith(f"apis/{GROUP}/") for path in told["paths"]))
        discovery = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
        client.until("/apis", lambda told: GROUP in [g["metadata"]["name"] for g in told["items"]], accept=discovery)
        # The apply has left kubectl with what there was before it.
        self.kubectl("api-resources", "--cached=false")

    def add_nodes(self, count: int) -> None:
        """Without GPUs, named plain-0, plain-1, ..."""
        client = self.client()
        for name in (f"plain-{number}" for number in range(count)):
            client.create("/api/v1/nodes", {"kind": "Node", "metadata": {"name": name}})
            client.until(f"/api/v1/nodes/{name}", lambda there: there["status"].get("phase") == "Running")

    def stop(self) -> None:
        """What was started last ends first; nothing is left behind."""
        if self._client is not None:
            self._client.close()
            self._client = None
        while self._processes:
            name = next(reversed(self._processes))
            self.end(name)

    def _start(self) -> None:
        self._ports = _free_ports("etcd", "api")
        self._write_files()
        self.start_etcd()
        self.start_api()
        self.start_controllers()
        self.start_scheduler()
        if self.kwok:
            self.start_kwok()
        client = self.client()
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        self._until("kube-controller-manager", lambda: client.find(account) is not None)

    def _etcd(self, call: str, body: dict[str, Any]) -> Any:
        url = f"http://127.0.0.1:{self._ports['etcd']}/v3/{call}"
        with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=20) as answer:
            return json.load(answer)

    def _write_files(self) -> None:
        self._authority = Authority(self.folder)
        self._authority.issue("server", "kube-apiserver")
        self._authority.issue("admin", "admin", "system:masters")
        self._authority.issue(ITSELF, ITSELF, "system:masters")
        self._authority.issue("front-proxy", "front-proxy")
        self._authority.service_account_key()
        self.kubeconfig.write_text(json.dumps(self._kubeconfig("admin", self.url)))
        self._own_kubeconfig.write_text(json.dumps(self._kubeconfig(ITSELF, self.url)))

    def _kubeconfig(self, user: str, url: str) -> dict[str, Any]:
        pki = self.folder
        cluster = {"server": url, "certificate-authority": str(pki / "ca.crt")}
        who = {"client-certificate": str(pki / f"{user}.crt"), "client-key": str(pki / f"{user}.key")}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": user, "user": who}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
            "current-context": "test",
        }

    def _run(self, name: str, *arguments: str) -> None:
        program = [str(TOOLS[name].path), *arguments]
        launch = [sys.executable, "-IS", "-c", _LAUNCH, str(os.getpid())]
        environment = {"HOME": str(self.folder), "PATH": os.environ["PATH"]}
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*launch, *program],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _until(self, name: str, is_ready: Any) -> None:
        deadline = time.monotonic() + READY_S
        while True:
            self._check_alive()
            try:
                if is_ready():
                    return
            except (OSError, Refused):
                pass
            if time.monotonic() > deadline:
                raise ControlPlaneError(f"{name} is not ready after {READY_S} s: {self._tail(name)}")
            time.sleep(0.05)

    def _check_alive(self) -> None:
        for name, process in self._processes.items():
            if process.poll() is not None:
                tail = self._tail(name)
                error = PortTaken if "address already in use" in tail else ControlPlaneError
                raise error(f"{name} ended with {process.returncode}: {tail}")

    def _tail(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-3000:]


def _free_ports(*names: str) -> dict[str, int]:
    """All held open together, so that they differ."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in names]
    try:
        return {name: held.getsockname()[1] for name, held in zip(names, sockets)}
    finally:
        for held in sockets:
            held.close()
