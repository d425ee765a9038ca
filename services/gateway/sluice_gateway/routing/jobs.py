"""A request that is ready to run, and what its end is worth in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sluice_gateway.openai import errors
from sluice_gateway.openai.client_names import NAMELESS, ClientNames
from sluice_gateway.openai.requests import Limits, Options
from sluice_gateway.routing.answer import Outcome


@dataclass(frozen=True, slots=True)
class Job:
    """A request that is ready to run: prompts in tokens, `n` choices each. `began_at`: when its body was there."""

    options: Options
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]
    seed: int
    thinking: bool
    deadline_s: float
    request_id: str
    began_at: float = 0.0
    names: ClientNames = NAMELESS

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.options.n

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


def output_budget(options: Options, prompt: int, limits: Limits, default: int | None, field: str) -> int:
    """Tokens that the answer may have: what was asked for, or the default, or what the context leaves."""
    limit = limits.max_context_tokens
    if prompt >= limit:
        raise errors.context_too_long(limit, prompt, options.max_tokens or 1, field)
    if options.max_tokens is None:
        return limit - prompt if default is None else min(default, limit - prompt)
    if prompt + options.max_tokens > limit:
        raise errors.context_too_long(limit, prompt, options.max_tokens, field)
    return options.max_tokens


def usage(job: Job, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    completion = sum(outcome.completion_tokens for outcome in outcomes)
    cached = _cached_tokens(outcomes, job.options.n)
    return {
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": job.prompt_tokens + completion,
        **({} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}),
        "completion_tokens_details": {"reasoning_tokens": sum(outcome.reasoning_tokens for outcome in outcomes)},
    }


def _cached_tokens(outcomes: Sequence[Outcome], n: int) -> int | None:
    """Of all prompts, as the first of its `n` choices has it that was told; None where none of a prompt was."""
    told = [outcome.cached_tokens for outcome in outcomes]
    first = [
        next((cached for cached in told[at : at + n] if cached is not None), None) for at in range(0, len(told), n)
    ]
    known = [cached for cached in first if cached is not None]
    return sum(known) if len(known) == len(first) else None


def route_report(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The way the first choice took; with several choices, all of them under `choices`."""
    reports: list[dict[str, Any]] = [
        {
            "prefill_pid": outcome.route.prefill_pid,
            "decode_pid": outcome.route.decode_pid,
            "records": outcome.route.records,
            "bytes": outcome.route.bytes,
            "transport": outcome.route.transport,
            "chunks": outcome.route.chunks,
            "tries": outcome.tries,
        }
        for outcome in outcomes
    ]
    return reports[0] | ({"choices": reports} if len(reports) > 1 else {})
