"""What a supervisor is told on its command line, and the spec that follows from it."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from sluice_engine.spec import load_spec
from sluice_protocol.engine_spec import EngineSpec
from sluice_runtime.errors import SpecError


def own_spec(
    path: Path, name: str, host: str, key_file: Path | None, tls_dir: Path | None = None
) -> tuple[EngineSpec, Path]:
    """The spec with what only this container knows, and the file that leader and rank find it in. Only this user
    can read it, since it holds the key. Raises SpecError."""
    spec = load_spec(path)
    if not name and not host and key_file is None and tls_dir is None:
        return spec, path
    try:
        key = spec.key if key_file is None else key_file.read_text().strip()
        tls = spec.tls if tls_dir is None else str(tls_dir)
        spec = msgspec.structs.replace(spec, name=name or spec.name, host=host or spec.host, key=key, tls=tls)
        own = Path(spec.run_dir) / "spec.json"
        own.unlink(missing_ok=True)
        own.touch(mode=0o600)
        own.write_bytes(msgspec.json.encode(spec))
    except OSError as error:
        raise SpecError(f"engine spec {path}: {error}") from error
    return spec, own


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run one engine of Sluice and watch it")
    parser.add_argument("--spec", type=Path, required=True, help="engine spec (JSON)")
    parser.add_argument("--name", default="", help="instead of the spec's: one spec serves many pods")
    parser.add_argument("--host", default="", help="instead of the spec's: the pod's address")
    parser.add_argument("--key-file", type=Path, help="holds the key, instead of the spec's")
    parser.add_argument("--tls-dir", type=Path, help="holds tls.crt, tls.key and ca.crt, instead of the spec's")
    parser.add_argument("--zygote", default="", help="socket of a zygote that several engines share")
    parser.add_argument("--parent", type=int, default=0, help="end when this process ends")
    return parser.parse_args(argv)
