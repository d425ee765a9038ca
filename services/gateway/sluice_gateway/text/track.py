"""One choice's tokens on their way to text: stop tokens, characters, reasoning, stop strings, logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sluice_gateway.openai.stops import StopScanner
from sluice_gateway.routing.session import Logprobs
from sluice_gateway.text.detokenize import Detokenizer, Pieces
from sluice_gateway.text.tokenizer import END_THINK
from sluice_protocol.generate import EndReason
from sluice_protocol.outputs import OutputLimit
from sluice_protocol.sampling import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Shown:
    """A token whose text is shown; `start` is the offset of that text, in characters of the choice's whole output."""

    token: int
    logprobs: TokenLogprobs
    start: int


class Sink(Protocol):
    """Where a choice's text goes. Called in order; nothing follows `finish`."""

    def pieces(self, insides: Sequence[bytes]) -> None:
        """Content, a token each, as the inside of a JSON string."""

    def text(self, content: str, reasoning: str, shown: Sequence[Shown]) -> None: ...

    def finish(self, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class TrackPlan:
    """`stop` are strings, looked for in the content. `reasons`: the text begins inside `<think>`.

    `top_logprobs`: None, or how many alternatives are shown beside each token.
    """

    limit: OutputLimit
    stop: tuple[str, ...] = ()
    reasons: bool = False
    top_logprobs: int | None = None


class Track:
    """`output_ids` are all tokens so far, over all tries; `finished` is the finish_reason once they end the choice."""

    def __init__(self, plan: TrackPlan, pieces: Pieces, sink: Sink) -> None:
        self.output_ids: list[int] = []
        self.finished: str | None = None
        self.reasoning_tokens = 0
        self._plan = plan
        self._sink = sink
        self._json = pieces.json
        self._detokenizer = Detokenizer(pieces)
        self._plain = not (plan.stop or plan.reasons or plan.top_logprobs is not None)
        self._thinking = StopScanner((END_THINK,)) if plan.reasons else None
        self._stops = StopScanner(plan.stop) if plan.stop else None
        self._characters = 0
        self._emitted = 0
        self._waiting: list[Shown] = []

    def push(self, tokens: Sequence[int], logprobs: Logprobs = None) -> bool:
        """Next tokens. True: a stop string came, no more tokens are wanted."""
        limit, known = self._plan.limit, self._json
        ready: list[bytes] = []  # of tokens that come together, and go out together
        for index, token in enumerate(tokens):
            if self.finished is not None:
                break
            self.output_ids.append(token)
            end = limit.end_after(token, len(self.output_ids))
            if end is EndReason.STOP:  # its text is not shown
                self._put(ready)
            elif self._plain and not self._detokenizer.pending and token in known:
                if inside := known[token]:
                    ready.append(inside)
            else:
                self._put(ready)
                if self._slow(token, None if logprobs is None else logprobs[index]):
                    return True
            if end is not None:
                self._put(ready)
                self._finish(end.value)
        self._put(ready)
        return False

    def _put(self, ready: list[bytes]) -> None:
        if ready:
            self._sink.pieces(ready)
            ready.clear()

    def end(self, reason: str) -> None:
        """The engine says that the choice ended."""
        self._finish(reason)

    def _slow(self, token: int, logprobs: TokenLogprobs | None) -> bool:
        text = self._detokenizer.push(token)
        top = self._plan.top_logprobs
        if top is not None and logprobs is not None:
            shown = TokenLogprobs(logprobs.logprob, logprobs.top_ids[:top], logprobs.top_logprobs[:top])
            self._waiting.append(Shown(token, shown, self._characters))
        self._characters += len(text)
        reasoning, content = self._split(text)
        if self._stops is None:
            self._emit(content, reasoning)
            return False
        scanned = self._stops.push(content)
        if scanned.matched is None:
            self._emit(scanned.text, reasoning)
            return False
        cut = self._characters - len(scanned.rest) - len(scanned.matched)
        self._waiting = [shown for shown in self._waiting if shown.start < cut]
        self._emit(scanned.text, reasoning)
        self._stops = None
        self._finish("stop")
        return True

    def _split(self, text: str) -> tuple[str, str]:
        """(reasoning, content) of new text; the tag between them belongs to neither."""
        if self._thinking is None:
            return "", text
        self.reasoning_tokens += 1
        scanned = self._thinking.push(text)
        if scanned.matched is None:
            return scanned.text, ""
        self._thinking = None
        self._emitted += len(scanned.matched)
        return scanned.text, scanned.rest

    def _emit(self, content: str, reasoning: str, last: bool = False) -> None:
        self._emitted += len(content) + len(reasoning)
        ready = [shown for shown in self._waiting if last or shown.start < self._emitted]
        if content or reasoning or ready:
            self._waiting = self._waiting[len(ready) :]
            self._sink.text(content, reasoning, ready)

    def _finish(self, reason: str) -> None:
        """What was held back is text after all; an unfinished character is dropped."""
        if self.finished is not None:
            return
        self.finished = reason
        reasoning = self._thinking.held if self._thinking is not None else ""
        self._emit(self._stops.held if self._stops is not None else "", reasoning, last=True)
        self._sink.finish(reason)
