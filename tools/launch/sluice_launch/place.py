"""What the engines and the gateway of one stack share: a key, the fleet file, the socket of a zygote."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Place:
    """`directory`: private to this user, there until all are gone. `key`: what leaders want to hear."""

    directory: Path
    key: str

    @property
    def zygote(self) -> Path:
        return self.directory / "zygote.sock"

    @property
    def fleet_file(self) -> Path:
        return self.directory / "fleet.json"

    def run_dir(self, name: str) -> Path:
        """A fresh one, for one life of the service of that name."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.directory))

    def write_fleet(self, members: Iterable[Mapping[str, str]]) -> None:
        """`members`: role, and address or what it is down for; see docs/gateway.md. A gateway never sees half of it.
        Raises OSError."""
        fresh = self.fleet_file.with_suffix(".new")
        fresh.write_text(json.dumps({"members": [dict(member) for member in members]}))
        fresh.replace(self.fleet_file)

    def gateway_arguments(self, model_name: str, tokenizer: str | Path, *more: str) -> tuple[str, ...]:
        """Of sluice_gateway. `tokenizer`: a model's directory, or "bytes". Writes the key file, readable by
        this user only. Raises OSError."""
        key_file = self.directory / "key"
        key_file.touch(mode=0o600)
        key_file.write_text(self.key)
        return (
            *("--model-name", model_name, "--tokenizer", str(tokenizer)),
            *("--key-file", str(key_file), "--fleet-file", str(self.fleet_file), *more),
        )
