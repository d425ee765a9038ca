"""What one engine is: a document that its launcher writes (`sluice up`, or the operator) and its processes read."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import msgspec

from sluice_protocol.generate import Role
from sluice_protocol.service_spec import RECORDER_FILE, HealthSpec, LogFormat


class SnapshotPolicy(StrEnum):
    """Where resumable boundaries are made.

    END_OF_PROMPT: at the last page boundary before the prompt's last token. EVERY_PAGE: at every boundary of a prompt.
    NEVER: no prefix is resumable. `Limits.snapshot_outputs` adds the boundaries that decoding crosses.
    """

    END_OF_PROMPT = "end-of-prompt"
    EVERY_PAGE = "every-page"
    NEVER = "never"

    def next_boundary(self, position: int, num_tokens: int, page_tokens: int) -> int | None:
        """Token position > `position` where a prefill of `num_tokens` tokens must end a chunk for a snapshot."""
        last = (num_tokens - 1) // page_tokens * page_tokens
        if self is SnapshotPolicy.NEVER or last <= position:
            return None
        if self is SnapshotPolicy.END_OF_PROMPT:
            return last
        return (position // page_tokens + 1) * page_tokens


class ScriptedSpec(msgspec.Struct, frozen=True):
    """The model without mathematics. `config`: a model's config.json whose record sizes to take; else tiny ones."""

    vocab_size: int = 512
    token_cost_us: float = 0.0
    step_cost_us: float = 0.0
    config: str = ""


class PortSpec(msgspec.Struct, frozen=True):
    """TCP ports; 0: the system picks one. `engine`, `source`: the leader's two gRPC servers. `probe`: the supervisor's.

    `transfer`: the range for NIXL as UCX takes it, "23000-23020"; empty: any. Pods want them fixed for their policies.
    """

    engine: int = 0
    source: int = 0
    probe: int = 0
    transfer: str = ""


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Zeros and empty strings mean: derived from the model.

    `model`: a directory as Hugging Face lays it out. `memory_bytes`: of all pools. `transport`: nixl | stream.
    `verify`: full | sample. `key`: shared by everything that one `sluice up` starts. `faults`: a directory to take
    orders from, where a fault package is installed. `otlp`: where traces go. `drain_s`: what
    runs may take so long once the engine drains, then it is given back. `tls`: a folder with tls.crt, tls.key and
    ca.crt; without one gRPC is plain text. `lockstep`: a step is planned when the one before is done, not meanwhile.
    `device`: what the ranks compute on; engines on devices of different classes do not hand over to each other.
    """

    role: Role
    name: str
    run_dir: str
    model: str = ""
    scripted: ScriptedSpec | None = None
    precision: str = ""
    page_tokens: int = 0
    chunk_tokens: int = 0
    step_tokens: int = 0
    max_running: int = 32
    max_context_tokens: int = 0
    memory_bytes: int = 0
    snapshots: SnapshotPolicy = SnapshotPolicy.END_OF_PROMPT
    snapshot_outputs: bool = False
    transport: str = "nixl"
    verify: str = "full"
    host: str = "127.0.0.1"
    ports: PortSpec = PortSpec()
    key: str = ""
    threads: int = 1
    perturb: int | None = None
    health: HealthSpec = HealthSpec()
    faults: str = ""
    log: LogFormat = LogFormat.HUMAN
    otlp: str = ""
    drain_s: float = 20.0
    tls: str = ""
    lockstep: bool = False
    device: str = "cpu"

    @property
    def socket_path(self) -> str:
        """Where ranks find the leader."""
        return str(Path(self.run_dir) / "ranks.sock")

    @property
    def sidecar_path(self) -> str:
        """Where the leader finds the transport sidecar."""
        return str(Path(self.run_dir) / "transport.sock")

    @property
    def recorder_path(self) -> Path:
        """The flight recorder: created by the supervisor, written by everybody."""
        return Path(self.run_dir) / RECORDER_FILE

    @property
    def has_transport(self) -> bool:
        return self.role is not Role.UNIFIED
