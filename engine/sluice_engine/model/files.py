"""Which files hold a model directory's weights. No torch."""

from __future__ import annotations

import json
from pathlib import Path

from sluice_engine.model.errors import BadWeights

INDEX = "model.safetensors.index.json"


def weight_files(directory: Path) -> list[Path]:
    """Those that the index names, sorted; without one all safetensors files of the directory. Raises BadWeights."""
    index = directory / INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            files = [directory / name for name in names]
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise BadWeights(f"file {index} is no index of safetensors ({error!r}); fetch it again") from error
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise BadWeights(f"directory {directory} has no safetensors files; name a model directory")
    for file in files:
        if not file.exists():
            raise BadWeights(f"file {file.relative_to(directory)} is in the index but not in {directory}; fetch it")
    return files
