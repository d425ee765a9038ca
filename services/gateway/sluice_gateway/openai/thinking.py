"""Whether the model is to think, and how hard. OpenAI, DeepSeek and the template have a field for it each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sluice_gateway.openai import fields as f
from sluice_gateway.openai.errors import quoted
from sluice_gateway.openai.fields import Json, take

NAMES = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_TEMPLATE = "chat_template_kwargs"


@dataclass(frozen=True, slots=True)
class Thinking:
    """`first`: what the effort puts first in the prompt."""

    is_on: bool
    first: str = ""


def read_thinking(body: Mapping[str, Json], efforts: Mapping[str, str]) -> Thinking:
    """A switch wins over an effort, `chat_template_kwargs` over `reasoning_effort`; without any, thinking is off.

    `efforts`: what the checkpoint knows, see `encoders.Efforts`."""
    kwargs: dict[str, Json] = take(body, _TEMPLATE, f.mapping, {})
    f.only_keys(_TEMPLATE, kwargs, frozenset({"thinking", "enable_thinking", "reasoning_effort"}))
    effort = _effort("reasoning_effort", body.get("reasoning_effort"), efforts)
    effort = _effort(f"{_TEMPLATE}.reasoning_effort", kwargs.get("reasoning_effort"), efforts) or effort or "none"
    switch = _switch(body, kwargs)
    is_on = effort != "none" if switch is None else switch
    return Thinking(is_on, efforts.get(effort, "") if is_on else "")


def _switch(body: Mapping[str, Json], kwargs: Mapping[str, Json]) -> bool | None:
    """Those that are given must agree."""
    told: dict[str, bool] = {}
    deepseeks: dict[str, Json] = take(body, "thinking", f.mapping, {})
    if body.get("thinking") is not None:
        f.only_keys("thinking", deepseeks, frozenset({"type"}))
        told["thinking.type"] = f.one_of("enabled", "disabled")("thinking.type", deepseeks.get("type")) == "enabled"
    for name in ("thinking", "enable_thinking"):
        if kwargs.get(name) is not None:
            told[f"{_TEMPLATE}.{name}"] = f.boolean(f"{_TEMPLATE}.{name}", kwargs[name])
    if len(set(told.values())) > 1:
        one, other, *_ = told
        raise f.wrong_value(one, f"it says the opposite of '{other}'; send one of them.")
    return next(iter(told.values()), None)


def _effort(field: str, value: Json, efforts: Mapping[str, str]) -> str | None:
    if value is None:
        return None
    effort = f.one_of(*NAMES)(field, value)
    if effort == "none" or effort in efforts:
        return effort
    if not efforts:
        raise f.wrong_value(
            field,
            "no effort can be chosen, for the checkpoint's chat encoder is not one that this gateway knows; send"
            ' "none", or {"thinking": {"type": "enabled"}} to have the model think.',
        )
    known = ", ".join(quoted(name) for name in ("none", *efforts))
    raise f.wrong_value(field, f"this model has no effort {quoted(effort)}; send one of {known}.")
