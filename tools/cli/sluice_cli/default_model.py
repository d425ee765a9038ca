"""Where the model lies that ships with Sluice."""

from __future__ import annotations

from pathlib import Path

NAME = "recall-1m"


def default_model() -> Path:
    """Inside an installed wheel beside this file, in a checkout under `models/`. Raises FileNotFoundError."""
    here = Path(__file__).resolve()
    for place in (here.parent / "models" / NAME, here.parents[3] / "models" / NAME):
        if (place / "config.json").exists():
            return place
    raise FileNotFoundError(f"the default model {NAME} is not installed: give --model DIRECTORY")
