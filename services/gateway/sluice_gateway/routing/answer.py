"""One choice from queue to last token, over as many tries as it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from sluice_gateway.faults import Faults, culprit_of, fault_delay, had_in_work
from sluice_gateway.routing.dispatch import Dispatcher, Placement, Ticket
from sluice_gateway.routing.queue import Waiting
from sluice_gateway.routing.retry import Done, GiveUp, judge
from sluice_gateway.routing.route import Wanted
from sluice_gateway.routing.session import TryResult
from sluice_gateway.routing.story import Story
from sluice_gateway.status.counters import Counters
from sluice_gateway.status.histograms import Latencies
from sluice_gateway.text.track import Track
from sluice_protocol.generate import Ended, GenerateRequest, Route

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a finished choice cost and how it came. `cached_tokens` None: no engine has told."""

    completion_tokens: int
    reasoning_tokens: int
    cached_tokens: int | None
    tries: int
    route: Route


class Choice:
    """`run` ends with an Outcome or raises the ApiError for the client."""

    def __init__(
        self,
        request: GenerateRequest,
        patience_s: float,
        fault_budget: int,
        began_at: float,
        track: Track,
        dispatcher: Dispatcher,
        clock: Clock,
        random: Random,
        counters: Counters,
        latencies: Latencies,
        story: Story,
    ) -> None:
        """`request` is the first try's, without a pair. `patience_s` bounds each wait for a place, counted from the
        last token. `began_at`: when the request's body was there."""
        self._latencies = latencies
        self._request = request
        self._patience_s, self._fault_budget, self._began_at = patience_s, fault_budget, began_at
        self._story = story
        self._track = track
        self._dispatcher = dispatcher
        self._clock = clock
        self._random = random
        self._counters = counters
        self._tries = 0
        self._spent = 0
        self._faults = Faults()
        self._progress_at = clock()
        self._avoid: frozenset[str] = frozenset()
        self._placement: Placement | None = None
        self._is_over = False

    def moves(self) -> bool:
        """Whether there is a sign of progress: engines that answer and can take it while it waits, within its time;
        while it runs, engines that are well by their supervisors' word and hold it."""
        if self._is_over:
            return False
        if self._placement is None:
            return self._clock() < self._progress_at + self._patience_s and self._dispatcher.usable() is None
        return self._placement.is_well

    async def run(self, ticket: Ticket) -> Outcome:
        try:
            outcome, reason = await self._run(ticket)
        except BaseException as error:
            self._story.fail(error, len(self._track.output_ids))
            raise
        finally:
            self._is_over = True
        self._story.end(reason, outcome.completion_tokens, outcome.tries)
        self._latencies.request.add(self._clock() - self._began_at)
        self._latencies.output_tokens.add(outcome.completion_tokens)
        return outcome

    async def _run(self, ticket: Ticket) -> tuple[Outcome, str]:
        """The outcome, and the reason of its end."""
        while True:
            placement = self._placement = await self._dispatcher.placed(ticket)
            self._tries += 1
            had = len(self._track.output_ids)
            result = None
            try:
                result = await self._try(placement)
            finally:
                self._story.end_try(result)
                self._placement = None
                self._dispatcher.release(placement)
            num_tokens = len(self._track.output_ids) - had
            if num_tokens:
                self._progress_at = self._clock()
                self._faults = self._faults.with_progress()
            culprit = culprit_of(result, placement.pair)
            repeat = self._faults.repeats(culprit)
            had_it = had_in_work(result, placement.pair, culprit, num_tokens)
            victims = self._faults.with_fault(culprit, had_it).victims
            step = judge(result, self._track.finished, self._tries, self._spent, self._fault_budget, repeat, victims)
            if isinstance(step, Done):
                self._track.end(step.reason)
                return self._outcome(result, placement), step.reason
            if isinstance(step, GiveUp):
                raise step.error
            self._counters.retries += 1
            self._story.again(result, step.spent)
            if step.source and placement.pair.prefill is not None:
                self._dispatcher.suspect(placement.pair.prefill.member.address)
            for address in placement.pair.addresses if step.drains else ():
                self._dispatcher.suspect(address)  # and ask it: its Load says which of the two it is
            self._avoid = frozenset(placement.pair.addresses) if step.avoid else frozenset()
            blamed: frozenset[str] = frozenset()
            if step.spent > self._spent or repeat:
                self._faults = self._faults.with_fault(culprit, had_it)
                blamed = frozenset(placement.pair.addresses if culprit is None else [culprit.address])
            self._spent = step.spent
            waiting = self._waiting_again(ticket, placement, step.delay_s, blamed)
            await self._dispatcher.prepare(waiting.wanted)
            ticket = self._dispatcher.enter_again(waiting)

    async def _try(self, placement: Placement) -> TryResult:
        produced = tuple(self._track.output_ids)
        request = replace(
            self._request,
            output_ids=produced,
            source_address=placement.pair.source_address,
            trace_context=self._story.begin_try(self._tries, placement.pair, len(produced)),
        )
        began_at = self._clock()

        def on_first() -> None:
            now = self._clock()
            self._latencies.prefill.add(now - began_at)
            if not self._track.output_ids:
                self._latencies.first_token.add(now - self._began_at)
            self._story.first_token()
            self._dispatcher.prefilled(placement)

        return await placement.decode.attempt(request, self._track.push, on_first, placement.prefill)

    def _waiting_again(self, ticket: Ticket, placement: Placement, delay_s: float, blamed: frozenset[str]) -> Waiting:
        hello = placement.pair.decode.hello
        produced = self._track.output_ids
        wanted = Wanted(
            self._request.prompt_ids + tuple(produced),
            hello.fingerprint if produced and hello is not None else None,
            self._avoid,
        )
        now = self._clock()
        deadline = self._progress_at + self._patience_s
        pause = fault_delay(self._faults.in_a_row, self._random.random(), deadline - now) if blamed else 0.0
        return Waiting(ticket.waiting.order, deadline, wanted, now + delay_s, now + pause, blamed)

    def _outcome(self, result: TryResult, placement: Placement) -> Outcome:
        """A stop string ends the try before the engine reported: then only the processes are known."""
        ended = result if isinstance(result, Ended) else None
        route = ended.route if ended is not None else Route()
        prefill, decode = placement.pair.prefill, placement.pair.decode
        if not route.decode_pid and decode.hello is not None:
            route = replace(route, decode_pid=decode.hello.pid)
        if not route.prefill_pid and prefill is not None and prefill.hello is not None:
            route = replace(route, prefill_pid=prefill.hello.pid)
        cached = None if ended is None else min(ended.cached_tokens, len(self._request.prompt_ids))
        return Outcome(len(self._track.output_ids), self._track.reasoning_tokens, cached, self._tries, route)
