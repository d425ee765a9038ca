"""A rendered pod as `docker run` has it: the kubelet's part, as far as one container after the other needs it.

What the pod does not allow is not there: the root file system is read-only where it says so, capabilities are dropped,
and nothing can be written but what an emptyDir, or the kubelet's own termination log, is mounted at.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

DOCKER_S, STOP_S = 120.0, 40
TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount"
Object = Mapping[str, Any]


def docker(*words: str, timeout_s: float = DOCKER_S) -> str:
    """stdout. AssertionError with both streams when it fails."""
    done = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"docker {' '.join(words[:6])}: {done.stdout}{done.stderr}"
    return done.stdout


def why_no_docker() -> str:
    """Empty when a daemon answers."""
    if shutil.which("docker") is None:
        return "docker is not there"
    told = subprocess.run(["docker", "version", "--format", "{{.Server.Version}}"], capture_output=True, timeout=30)
    return "" if told.returncode == 0 else f"no docker daemon: {told.stderr.decode()[-300:]}"


class Network:
    """Addresses like those of pods, out of reach of everything but this machine; gone when left."""

    def __init__(self) -> None:
        self.name = f"sluice-test-{uuid.uuid4().hex[:8]}"
        self._last = 1

    def __enter__(self) -> Self:
        told = ""
        for third in range(64, 96):  # somebody else's may overlap
            self._prefix = f"10.213.{third}"
            words = ["network", "create", "--internal", "--subnet", f"{self._prefix}.0/24", self.name]
            done = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=DOCKER_S)
            if done.returncode == 0:
                return self
            told = done.stderr
        raise AssertionError(f"no network for the test: {told}")

    def __exit__(self, *exc: object) -> None:
        docker("network", "rm", self.name)

    @property
    def gateway(self) -> str:
        """This machine, as the pods see it."""
        return f"{self._prefix}.1"

    def address(self) -> str:
        self._last += 1
        return f"{self._prefix}.{self._last}"


@dataclass
class Pod:
    """One pod of `template`, a PodTemplateSpec or a Pod. `files`: name of a Secret or ConfigMap -> its data.

    `images`: name in the template -> image to run. `environment`, `hosts`: what a cluster would tell it besides.
    """

    template: Object
    network: Network
    folder: Path
    files: Mapping[str, Mapping[str, bytes]]
    images: Mapping[str, str]
    name: str = "pod-0"
    namespace: str = "ns"
    environment: Mapping[str, str] = field(default_factory=dict)
    hosts: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spec: Object = self.template["spec"]
        self.address = self.network.address()
        self.id = f"{self.network.name}-{self.name}"
        self.main: Object = self.spec["containers"][0]
        self.folder.mkdir()
        self.folder.chmod(0o755)

    def __enter__(self) -> Self:
        for number, container in enumerate(self.spec.get("initContainers", ())):
            docker(
                *self._run(container, f"{self.id}-init{number}"),
                "--rm",
                *self._command(container, [*container["command"]]),
            )
        docker(*self._run(self.main, self.id), "--detach", *self._command(self.main, self._words()))
        return self

    def __exit__(self, *exc: object) -> None:
        subprocess.run(["docker", "rm", "--force", self.id], capture_output=True, timeout=DOCKER_S)

    def _words(self) -> list[str]:
        return [*self.main.get("command", ()), *self.main.get("args", ())]

    # -- as the kubelet does ---------------------------------------------------------------------------------------

    def _run(self, container: Object, name: str) -> list[str]:
        words = ["run", "--name", name, "--network", self.network.name, "--ip", self.address]
        for host, address in self.hosts.items():
            words += ["--add-host", f"{host}:{address}"]
        for key, value in self._environment(container).items():
            words += ["--env", f"{key}={value}"]
        return [*words, *self._security(container), *self._mounts(container)]

    def _command(self, container: Object, command: list[str]) -> list[str]:
        """The image, and `command` with $(NAME) in place."""
        known = self._environment(container)
        first, *rest = [re.sub(r"\$\((\w+)\)", lambda m: known.get(m[1], m[0]), word) for word in command]
        return ["--entrypoint", first, self.images[container["image"]], *rest]

    def _environment(self, container: Object) -> dict[str, str]:
        told = {env["name"]: env.get("value") or self._value(env["valueFrom"]) for env in container.get("env", ())}
        return told | dict(self.environment)

    def _value(self, source: Object) -> str:
        if "secretKeyRef" in source:
            return self.files[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]].decode()
        facts = {"metadata.name": self.name, "metadata.namespace": self.namespace, "status.podIP": self.address}
        return facts[source["fieldRef"]["fieldPath"]]

    def _security(self, container: Object) -> list[str]:
        pod, own = self.spec["securityContext"], container["securityContext"]
        assert pod["runAsNonRoot"] is True
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}  # docker's default is the same filter
        words = ["--user", f"{pod['runAsUser']}:{pod['runAsGroup']}"]
        words += ["--group-add", str(pod["fsGroup"])] if "fsGroup" in pod else []
        words += ["--read-only"] if own.get("readOnlyRootFilesystem") else []
        words += ["--security-opt", "no-new-privileges"] if own.get("allowPrivilegeEscalation") is False else []
        for name in own.get("capabilities", {}).get("drop", ()):
            words += ["--cap-drop", name]
        for name in own.get("capabilities", {}).get("add", ()):
            words += ["--cap-add", name]
        return words

    def _mounts(self, container: Object) -> list[str]:
        volumes = {volume["name"]: volume for volume in self.spec.get("volumes", ())}
        shared = {mount["name"] for init in self.spec.get("initContainers", ()) for mount in init["volumeMounts"]}
        words: list[str] = []
        for mount in container.get("volumeMounts", ()):
            volume, path = volumes[mount["name"]], mount["mountPath"]
            if "emptyDir" in volume and mount["name"] not in shared:
                size = volume["emptyDir"].get("sizeLimit", "1Gi").removesuffix("i").lower()
                words += ["--tmpfs", f"{path}:rw,exec,mode=1777,size={size}"]
            else:
                words += ["--volume", f"{self._folder(volume)}:{path}{':ro' if mount.get('readOnly') else ''}"]
        log = self.folder / "termination-log"
        log.touch()
        log.chmod(0o666)
        words += ["--volume", f"{log}:/dev/termination-log"]
        if self.spec.get("automountServiceAccountToken", True):
            words += ["--volume", f"{self._files('serviceaccount')}:{TOKEN}:ro"]
        return words

    def _folder(self, volume: Object) -> Path:
        if "emptyDir" in volume:
            folder = self.folder / f"volume-{volume['name']}"
            folder.mkdir(exist_ok=True)
            folder.chmod(0o777)
            return folder
        if "secret" in volume:
            return self._files(volume["secret"]["secretName"])
        return self._files(volume["configMap"]["name"])

    def _files(self, name: str) -> Path:
        folder = self.folder / f"files-{name}"
        folder.mkdir(exist_ok=True)
        for file, data in self.files[name].items():
            (folder / file).write_bytes(data)
        folder.chmod(0o755)
        return folder

    # -- as its probes do ------------------------------------------------------------------------------------------

    def probe(self, kind: str) -> tuple[int, str]:
        """(status, body) of the container's own probe of that kind, asked from outside; (0, why) if nobody answers."""
        http = self.main[kind]["httpGet"]
        ports = {port["name"]: port["containerPort"] for port in self.main["ports"]}
        return self.get(http["path"], ports[http["port"]])

    def get(self, path: str, port: int) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{self.address}:{port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, repr(error)

    def until(self, kind: str, status: int = 200, timeout_s: float = 60.0) -> float:
        """Seconds until the probe of that kind answers with `status`. AssertionError with the log if it never does, or
        if the container ends."""
        began = time.monotonic()
        while (told := self.probe(kind))[0] != status:
            assert self.is_running, f"{self.id} ended with {self.state['ExitCode']}: {self.log()[-3000:]}"
            assert time.monotonic() - began < timeout_s, f"{self.id}: {kind} says {told}: {self.log()[-3000:]}"
            time.sleep(0.1)
        return time.monotonic() - began

    @property
    def state(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(docker("inspect", "--format", "{{json .State}}", self.id))
        return told

    @property
    def is_running(self) -> bool:
        return bool(self.state["Running"])

    def log(self) -> str:
        done = subprocess.run(["docker", "logs", self.id], capture_output=True, text=True, timeout=DOCKER_S)
        return done.stdout + done.stderr

    def stop(self) -> int:
        """SIGTERM; its exit status."""
        docker("stop", "--time", str(STOP_S), self.id, timeout_s=STOP_S + 20)
        return int(self.state["ExitCode"])

    def wait(self, timeout_s: float = 60.0) -> int:
        """Until it ends by itself."""
        return int(docker("wait", self.id, timeout_s=timeout_s))

    def run_in(self, *command: str) -> str:
        """In the running container, as its user."""
        return docker("exec", self.id, *command)
