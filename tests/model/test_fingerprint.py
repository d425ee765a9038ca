"""Two checkpoints that differ in any byte that is loaded have two fingerprints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sluice_engine.fingerprint import revision_digest
from sluice_engine.model.errors import BadWeights
from sluice_engine.spec import resolve
from sluice_protocol.engine_spec import EngineSpec, ScriptedSpec
from sluice_protocol.generate import Role
from sluice_runtime.errors import SpecError

PARTS = ("model-1.safetensors", "weights/model-2.safetensors")


def checkpoint(directory: Path, second: float, picks: tuple[str, ...] = PARTS, **files: float) -> Path:
    """Two files, one of them in a folder of its own; `files` are beside them."""
    (directory / "weights").mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    values = dict(zip(PARTS, (1.0, second), strict=True)) | {f"{name}.safetensors": v for name, v in files.items()}
    for name, value in values.items():
        save_file({name: torch.full((8,), value)}, directory / name)
    index = {"weight_map": {f"tensor {n}": name for n, name in enumerate(picks)}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def test_a_file_in_a_folder_counts(tmp_path: Path) -> None:
    one, same, other = (checkpoint(tmp_path / str(n), value) for n, value in enumerate((2.0, 2.0, 3.0)))
    assert revision_digest(one) == revision_digest(same)
    assert revision_digest(one) != revision_digest(other)


def test_it_counts_which_files_the_index_picks(tmp_path: Path) -> None:
    digests = {
        revision_digest(checkpoint(tmp_path / pick, 2.0, (f"{pick}.safetensors",), a=5.0, b=6.0)) for pick in "ab"
    }
    assert len(digests) == 2


def test_what_the_index_does_not_name_does_not_count(tmp_path: Path) -> None:
    assert revision_digest(checkpoint(tmp_path / "a", 2.0)) == revision_digest(
        checkpoint(tmp_path / "b", 2.0, more=1.0)
    )


@pytest.mark.parametrize("spoil", ["{", "[]", '{"weight_map": [1]}', '{"weight_map": {"a": 5}}', '{"weight_map": {}}'])
def test_an_index_that_is_none_is_refused(tmp_path: Path, spoil: Any) -> None:
    directory = checkpoint(tmp_path / "a", 2.0)
    (directory / "model.safetensors.index.json").write_text(spoil)
    with pytest.raises(BadWeights):
        revision_digest(directory)


def test_a_file_that_is_not_there_is_named_with_its_folder(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "a", 2.0)
    (directory / PARTS[1]).unlink()
    with pytest.raises(BadWeights, match=r"weights/model-2\.safetensors is in the index"):
        revision_digest(directory)


def spec(tmp_path: Path, **more: Any) -> EngineSpec:
    return EngineSpec(role=Role.UNIFIED, name="u", run_dir=str(tmp_path), scripted=ScriptedSpec(), **more)


def test_the_class_of_the_device_counts(tmp_path: Path) -> None:
    """Equal weights on devices that round differently make different records."""
    assert resolve(spec(tmp_path)).fingerprint.as_dict()["device"] == "cpu"


def test_a_device_that_this_build_cannot_use_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="device is 'cuda:0': this build computes on 'cpu' only"):
        resolve(spec(tmp_path, device="cuda:0"))
