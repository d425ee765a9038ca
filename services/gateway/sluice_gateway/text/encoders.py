"""Which efforts of reasoning a checkpoint knows: read from the chat encoder that DeepSeek ships with it, which is never
executed. An encoder is known by its digest; its texts are literals in it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

ENCODER = Path("encoding") / "encoding_dsv4.py"
MOST_BYTES = 1 << 20

# Names of OpenAI's field, as DeepSeek documents what they mean: of the final checkpoints, which have three tiers, and
# of the preview, which has two.
THREE_TIERS = {"minimal": "low", "low": "low", "medium": "high", "high": "high", "xhigh": "max", "max": "max"}
TWO_TIERS = {"minimal": "high", "low": "high", "medium": "high", "high": "high", "xhigh": "max", "max": "max"}


@dataclass(frozen=True, slots=True)
class Encoder:
    """`tiers` takes the literals of the file to the paragraph of each tier; KeyError: one is not there."""

    name: str
    names: Mapping[str, str]
    tiers: Callable[[Mapping[str, Any]], Mapping[str, str]]


PREVIEW = Encoder("preview", TWO_TIERS, lambda told: {"high": "", "max": told["REASONING_EFFORT_MAX"]})
FINAL = Encoder("final", THREE_TIERS, lambda told: told["REASONING_EFFORT_PROMPTS"])

KNOWN: dict[str, Encoder] = {
    # DeepSeek-V4-Flash 60d8d70, -Pro b5968e9, -Flash-DSpark 62af8ff
    "bdbd57c132a1b3725042323d02b98b9d1df28e5f388f134399555d041f5055e0": PREVIEW,
    # DeepSeek-V4-Flash-0731 7872f01 and 9e165c3, -Pro-0813 72e1d32
    "abc0d26120250dda0ae077dc64aa28836026e61e970854aaeb792445e6a0dde6": FINAL,
}


@dataclass(frozen=True, slots=True)
class Efforts:
    """`paragraphs`: what each name that a client may send puts first in the prompt. `trouble`: why there are none."""

    paragraphs: dict[str, str] = field(default_factory=dict)
    trouble: str = ""


SCRIPTED = Efforts(dict.fromkeys(("minimal", "low", "medium", "high"), ""))
"""Of `--tokenizer bytes` and `script`, which have no checkpoint: they turn thinking on, and say nothing."""


def efforts_of(tokenizer: str, known: Mapping[str, Encoder] = KNOWN) -> Efforts:
    """Of the checkpoint in the directory `tokenizer`."""
    if tokenizer in ("bytes", "script"):
        return SCRIPTED
    path = Path(tokenizer) / ENCODER
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        return Efforts(trouble=f"{path} cannot be read ({error.strerror})")
    encoder = known.get(sha256(data).hexdigest())
    if encoder is None:
        return Efforts(trouble=f"{path} is no encoder that this gateway knows (SHA-256 {sha256(data).hexdigest()})")
    try:
        tiers = encoder.tiers(_literals(data))
        return Efforts({name: str(tiers[tier]) for name, tier in encoder.names.items()})
    except KeyError as error:
        return Efforts(trouble=f"{path} has no {error.args[0]}")


def _literals(source: bytes) -> dict[str, Any]:
    """What is assigned to names at the top of a Python file, where it is a literal."""
    found: dict[str, Any] = {}
    for node in ast.parse(source).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                pass
            case _:
                continue
        try:
            found[name] = ast.literal_eval(value)
        except ValueError:
            continue
    return found
