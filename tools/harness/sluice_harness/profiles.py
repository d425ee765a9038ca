"""The kinds of service that rows run against. Sizes are such that every phase lasts long enough to be met."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# The scripted model's cost of a token: a prompt of PROMPT_LONG tokens takes seconds, an answer of LONG_ANSWER too.
TOKEN_COST_US = 1000.0
LONG_PROMPT = "a long story, told again and again; " * 70
LONG_ANSWER, SHORT_ANSWER = 500, 5


@dataclass(frozen=True, slots=True)
class Profile:
    """`scripted`: fields of ScriptedSpec; None takes a real model, whose ranks come from a zygote. `spec`: more fields
    of every engine's spec."""

    roles: tuple[str, ...]
    scripted: Mapping[str, Any] | None = field(default_factory=lambda: {"token_cost_us": TOKEN_COST_US})
    spec: Mapping[str, Any] = field(default_factory=dict)
    long_prompt: str = LONG_PROMPT
    long_answer: int = LONG_ANSWER


_SMALL = {"max_running": 4, "chunk_tokens": 64}

PROFILES: Mapping[str, Profile] = {
    "pair": Profile(("prefill", "decode"), spec=_SMALL),
    "unified": Profile(("unified",), spec=_SMALL),
    "stream": Profile(("prefill", "decode"), spec=_SMALL | {"transport": "stream", "memory_bytes": 64 << 20}),
    "two-pairs": Profile(("prefill", "decode", "prefill", "decode"), spec=_SMALL),
    # Ranks forked from a zygote that imported torch.
    "model": Profile(("prefill", "decode"), None, {"max_running": 4}, "hello " * 100, 200),
    # One step of 16,000 tokens, a thousand times the usual prompt of 16: longer than any floor that is tried here.
    "huge-step": Profile(
        ("prefill", "decode"),
        {"token_cost_us": 700.0},
        {"max_running": 4, "chunk_tokens": 16384, "step_tokens": 17000, "max_context_tokens": 20000},
        "once " * 3200,
        20,
    ),
    # Every line of a log is a record.
    "json": Profile(("prefill", "decode"), spec=_SMALL | {"log": "json"}),
    # Two rows: whoever comes third waits.
    "narrow": Profile(("prefill", "decode"), spec=_SMALL | {"max_running": 2}),
}
