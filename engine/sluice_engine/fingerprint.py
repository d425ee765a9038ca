"""The part of a fingerprint that says which weights: two fine-tunes of one shape must differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from sluice_engine.model.files import weight_files

# Files below this are hashed whole; of larger ones the header and sampled bytes of every tensor.
WHOLE_FILE_BYTES = 1 << 30
SAMPLE_BYTES = 4096
# Small enough that a slow disk or network shows progress within any budget of a start.
_BLOCK = 1 << 20

OnRead = Callable[[int], None]


def config_digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def unheard(nbytes: int) -> None:
    """An OnRead that does nothing."""


def revision_digest(directory: Path, on_read: OnRead = unheard) -> str:
    """32 hex digits over config.json and every file that weights are loaded from. `on_read` hears how many bytes were
    read, again and again. Raises BadWeights where there are none."""
    state = hashlib.blake2b(digest_size=16)
    state.update((directory / "config.json").read_bytes())
    for path in weight_files(directory):
        state.update(f"{path.relative_to(directory)}:{path.stat().st_size};".encode())
        if path.stat().st_size < WHOLE_FILE_BYTES:
            _hash_whole(state, path, on_read)
        else:
            _hash_samples(state, path, on_read)
    return state.hexdigest()


def _hash_whole(state: hashlib.blake2b, path: Path, on_read: OnRead) -> None:
    with path.open("rb", buffering=0) as file:  # what has come, and not only what fills a block
        while block := file.read(_BLOCK):
            state.update(block)
            on_read(len(block))


def _hash_samples(state: hashlib.blake2b, path: Path, on_read: OnRead) -> None:
    """Beginning, middle and end of every tensor."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length)
        state.update(header)
        for name, entry in sorted(json.loads(header).items()):
            if name == "__metadata__":
                continue
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            for start in (begin, max(begin, (begin + end - SAMPLE_BYTES) // 2), max(begin, end - SAMPLE_BYTES)):
                file.seek(start)
                sample = file.read(min(SAMPLE_BYTES, end - start))
                state.update(start.to_bytes(8, "little") + sample)
                on_read(len(sample))
