"""One choice's tokens on their way to a client: stop tokens, characters, parts, stop strings, sink."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sluice_gateway.openai.stops import StopScanner
from sluice_gateway.routing.session import Logprobs
from sluice_gateway.text.deltas import Delta, Part, PartParser, Shown
from sluice_gateway.text.detokenize import Detokenizer, Pieces
from sluice_protocol.generate import EndReason
from sluice_protocol.outputs import OutputLimit
from sluice_protocol.sampling import TokenLogprobs


class Sink(Protocol):
    """Where a choice's text goes. Called in order; nothing follows `finish`."""

    def pieces(self, insides: Sequence[bytes]) -> None:
        """Content, a token each, as the inside of a JSON string."""

    def delta(self, delta: Delta) -> None: ...

    def finish(self, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class TrackPlan:
    """`stop` are strings, looked for in the content. `end_think`: the answer begins with reasoning, which this token
    ends; None: it has none.

    `top_logprobs`: None, or how many alternatives are shown beside each token.
    """

    limit: OutputLimit
    stop: tuple[str, ...] = ()
    end_think: int | None = None
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
        self._plain = not (plan.stop or plan.end_think is not None or plan.top_logprobs is not None)
        self._parser = PartParser(plan.end_think)
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
        """True: a stop string ends with this token."""
        part = self._parser.part
        if part is Part.REASONING:
            self.reasoning_tokens += 1
        text = self._detokenizer.flush() if self._parser.ends_part(token) else self._detokenizer.push(token)
        top = self._plan.top_logprobs
        if top is not None and logprobs is not None:
            shown = TokenLogprobs(logprobs.logprob, logprobs.top_ids[:top], logprobs.top_logprobs[:top])
            self._waiting.append(Shown(token, shown, self._characters))
        self._characters += len(text)
        if part is not Part.CONTENT or self._stops is None:
            self._emit(part, text)
            return False
        scanned = self._stops.push(text)
        if scanned.matched is None:
            self._emit(part, scanned.text)
            return False
        cut = self._characters - len(scanned.rest) - len(scanned.matched)
        self._waiting = [shown for shown in self._waiting if shown.start < cut]
        self._emit(part, scanned.text)
        self._stops = None
        self._finish("stop")
        return True

    def _emit(self, part: Part, text: str, last: bool = False) -> None:
        self._emitted += len(text)
        ready = [shown for shown in self._waiting if last or shown.start < self._emitted]
        if text or ready:
            self._waiting = self._waiting[len(ready) :]
            self._sink.delta(Delta(part, text, ready))

    def _finish(self, reason: str) -> None:
        """What was held back is text after all; an unfinished character is dropped."""
        if self.finished is not None:
            return
        self.finished = reason
        held = self._stops.held if self._stops is not None else ""
        self._emit(self._parser.part, held, last=True)
        self._sink.finish(reason)
