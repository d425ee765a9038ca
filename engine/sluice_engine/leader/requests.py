"""The requests of gateways inside one engine: where their tokens go, and the last word to each. No gRPC."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sluice_engine.leader.generation import Generation
from sluice_engine.leader.publish import Published, publish_token
from sluice_protocol.generate import EndReason, GenerateRequest, Refused, TokenBatch
from sluice_protocol.sampling import TokenLogprobs
from sluice_runtime import log

TakeTokens = Callable[[TokenBatch], None]


@dataclass(slots=True)
class Requests:
    """`generations`: by sequence, shared with the step loop. `sinks`: the Attach stream of each gateway."""

    generations: dict[int, Generation]
    sinks: dict[str, TakeTokens] = field(default_factory=dict)
    _taken: set[tuple[str, int]] = field(default_factory=set)  # gateway and number of each generation

    def objection_to(self, request: GenerateRequest) -> Refused | None:
        """Why this request cannot be taken, whatever the engine has room for."""
        if request.gateway_id not in self.sinks:
            return Refused("NotAttached", f"gateway {request.gateway_id!r} has no Attach stream here", 50)
        if (request.gateway_id, request.stream) in self._taken:
            return Refused("StreamTaken", f"stream {request.stream} of this gateway is another request's, which runs")
        return None

    def add(self, generation: Generation) -> None:
        self.generations[generation.sequence] = generation
        if generation.gateway_id:
            self._taken.add((generation.gateway_id, generation.number))

    def attach(self, gateway_id: str, sink: TakeTokens) -> None:
        """Tokens of `gateway_id` go to `sink` from now on; a later attach takes over."""
        self.sinks[gateway_id] = sink

    def detach(self, gateway_id: str, sink: TakeTokens) -> list[Generation]:
        """A gateway without its Attach stream cannot get tokens. The generations that have ended with it."""
        if self.sinks.get(gateway_id) != sink:  # equal, not identical: a method is bound anew at every mention
            return []
        del self.sinks[gateway_id]
        lost = [each for each in self.generations.values() if each.gateway_id == gateway_id]
        for generation in lost:
            self.end(generation, EndReason.FAILED, "AttachLost", "the gateway's Attach stream ended")
        return lost

    def end(self, generation: Generation, reason: EndReason, error: str = "", detail: str = "") -> None:
        """Send the last word of a generation. Idempotent."""
        self._forget(generation)
        if generation.finish(reason, error, detail):
            tokens = generation.sent
            generation.span.end(error, reason=reason.value, tokens=tokens)
            if generation.request_id:
                why = {"error": error, "detail": detail} if error else {}
                log.info("request ended", request=generation.request_id, reason=reason.value, tokens=tokens, **why)

    def abandon(self, generation: Generation) -> bool:
        """Forget a generation whose caller is gone. False when it had ended before."""
        if generation.sequence not in self.generations:
            return False
        self._forget(generation)
        log.info("request abandoned", request=generation.request_id, tokens=generation.sent)
        generation.span.end("Abandoned", tokens=generation.sent)
        return True

    def publish(self, published: Published) -> None:
        """Tokens to their gateways, and the last word to the generations that end with them."""
        for gateway, batch in published.batches.items():
            sink = self.sinks.get(gateway)
            if sink is not None and batch.tokens:
                sink(batch)
        for generation in published.ended:
            if generation.end is not None:
                self.end(generation, generation.end)
        for generation, detail in published.failed:
            self.end(generation, EndReason.FAILED, "BadLogits", detail)

    def publish_first(self, generation: Generation, token: int, logprobs: TokenLogprobs | None) -> None:
        """The first token of a handoff, which is streamed before the pull ends."""
        self.publish(publish_token(generation, token, logprobs))

    def oldest_waiting_s(self, now: float) -> float:
        """Of the requests without a token yet."""
        arrivals = [each.arrived for each in self.generations.values() if each.sent == 0]
        return now - min(arrivals) if arrivals else 0.0

    def _forget(self, generation: Generation) -> None:
        self.generations.pop(generation.sequence, None)
        self._taken.discard((generation.gateway_id, generation.number))
