"""The training scripts import each other as plain modules, as they do when run."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "train"))
