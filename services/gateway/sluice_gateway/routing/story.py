"""What a choice lived through, told as log lines and as spans: queued, tried on a pair, tried again, ended."""

from __future__ import annotations

import asyncio

from sluice_gateway.openai.client_names import NAMELESS, ClientNames
from sluice_gateway.routing.fleet import Pair
from sluice_gateway.routing.retry import classify
from sluice_gateway.routing.session import TryResult
from sluice_protocol.generate import Ended, EndReason
from sluice_runtime import log
from sluice_runtime.tracing import NO_TRACER, Span, Tracer


class Story:
    """One per choice. `names`: what the client calls the request."""

    def __init__(
        self, request_id: str, prompt_tokens: int, tracer: Tracer = NO_TRACER, names: ClientNames = NAMELESS
    ) -> None:
        self._id = request_id
        self._tracer = tracer
        self._span = tracer.begin(
            "gateway request", names.trace_parent, request=request_id, prompt_tokens=prompt_tokens
        )
        self._try: Span | None = None
        named = {"client_request": names.request_id} if names.request_id else {}
        log.info("request queued", request=request_id, prompt_tokens=prompt_tokens, **named)

    def begin_try(self, number: int, pair: Pair, had: int) -> str:
        """The traceparent for the engines."""
        decode = pair.decode.member.address
        prefill = "" if pair.prefill is None else pair.prefill.member.address
        self._try = self._tracer.begin(
            "try", self._span.context, number=number, decode=decode, prefill=prefill, output_tokens=had
        )
        log.info("request tried", request=self._id, number=number, decode=decode, prefill=prefill, output_tokens=had)
        return self._try.context

    def first_token(self) -> None:
        if self._try is not None:
            self._try.event("first token")

    def end_try(self, result: TryResult | None) -> None:
        """`result` None: it is not wanted any more."""
        if self._try is None:
            return
        fine = isinstance(result, Ended) and result.reason in (EndReason.STOP, EndReason.LENGTH)
        error = "" if fine else "Abandoned" if result is None else classify(result)[0]
        self._try.end(error)
        self._try = None

    def again(self, result: TryResult, spent: int) -> None:
        reason, detail, _, _ = classify(result)
        self._span.event("again", reason=reason)
        log.warning("request is tried again", request=self._id, reason=reason, detail=detail, faults=spent)

    def end(self, reason: str, tokens: int, tries: int) -> None:
        log.info("request ended", request=self._id, reason=reason, tokens=tokens, tries=tries)
        self._span.end("", reason=reason, tokens=tokens, tries=tries)

    def fail(self, error: BaseException, tokens: int) -> None:
        """It ended without an answer, or none is waited for any more."""
        if isinstance(error, asyncio.CancelledError):
            log.info("request abandoned", request=self._id, tokens=tokens)
        else:
            log.warning("request failed", request=self._id, error=str(error), tokens=tokens)
        self._span.end(type(error).__name__, tokens=tokens)
