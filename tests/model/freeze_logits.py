"""Write `frozen_logits.safetensors`: transformers' logits of a tiny random checkpoint, for the fast tests.

.venv/bin/python tests/model/freeze_logits.py
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent


def main() -> None:
    spec = importlib.util.spec_from_file_location("world", HERE / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    world = importlib.util.module_from_spec(spec)
    sys.modules["world"] = world
    spec.loader.exec_module(world)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        (directory / "config.json").write_text(json.dumps(world.TINY))
        config = world.load_model_config(directory)
        tensors = world.random_tensors(config, seed=0)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        checkpoint = world.Checkpoint(config, world.load_weights(directory, config), directory)
        tokens = torch.randint(0, config.vocab_size, (75,), generator=torch.Generator().manual_seed(7))
        logits = checkpoint.logits(tokens.tolist())
    total = torch.stack([t.double().abs().sum() for t in tensors.values()]).sum()
    save_file({"tokens": tokens, "logits": logits, "weights": total.view(1)}, HERE / "frozen_logits.safetensors")


if __name__ == "__main__":
    main()
