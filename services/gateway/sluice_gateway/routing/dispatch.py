"""The queue at work: holds what waits, asks `queue.py` which entry goes, keeps count of what runs where."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from random import Random

from sluice_gateway.openai import errors
from sluice_gateway.routing.fleet import Engine, Pair
from sluice_gateway.routing.link import Link
from sluice_gateway.routing.queue import Dispatch, Waiting, expired, fits, may_wait, next_dispatch, wake_at
from sluice_gateway.routing.route import NO_PAIR, BlockKeys, NoRoute, Wanted, no_pair
from sluice_gateway.status.histograms import Latencies

Clock = Callable[[], float]
LONG_PROMPT = 16_384

MOST_QUEUED_TOKENS = 1 << 24
"""Of all prompts that wait: their ids take 36 bytes each, so 600 MB."""


@dataclass(eq=False, slots=True)
class Placement:
    """A place on a pair, held until `Dispatcher.release`. The prefill side is given back at the first token."""

    pair: Pair
    decode: Link
    decode_epoch: int
    prefill: Link | None = None
    prefill_epoch: int = 0

    @property
    def is_well(self) -> bool:
        """Whether its engines answer and are not stuck by their supervisors' word, and the decode side holds work. An
        engine that holds none has lost what was sent to it."""
        links = [self.decode] if self.prefill is None else [self.decode, self.prefill]
        load = self.decode.view.load
        return not any(link.is_sick for link in links) and load is not None and not load.empty

    def release_prefill(self) -> None:
        if self.prefill is not None:
            self.prefill.end(self.prefill_epoch)
            self.prefill = None


@dataclass(eq=False, slots=True)
class Ticket:
    waiting: Waiting
    since: float
    claimed: bool = False
    future: asyncio.Future[Placement] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Dispatcher:
    """`links` is the live set of engines by address; its owner calls `changed`."""

    def __init__(
        self,
        links: Mapping[str, Link],
        clock: Clock,
        limit: int,
        outage_s: float,
        random: Random,
        block_keys: BlockKeys,
        latencies: Latencies | None = None,
    ) -> None:
        self._latencies = latencies or Latencies()
        self._links = links
        self._clock = clock
        self._limit = limit
        self._outage_s = outage_s
        self._was_usable = False
        self._began_at = clock()
        self._usable_at: float | None = None
        self._random = random
        self._block_keys = block_keys
        self._tickets: list[Ticket] = []
        self._timer: asyncio.TimerHandle | None = None
        self._reason: NoRoute | None = None
        self._next_order = 0
        self.running = 0
        self.dispatched = 0

    @property
    def queued(self) -> int:
        return len(self._tickets)

    def waiting(self) -> list[tuple[Wanted, float]]:
        """What is wanted, and for how many seconds by now."""
        now = self._clock()
        return [(ticket.waiting.wanted, now - ticket.since) for ticket in self._tickets]

    def placeable(self) -> int:
        """Choices that wait though one of them could go now: none, but between a change and its pump."""
        waiting = [ticket.waiting for ticket in self._tickets]
        step = next_dispatch(waiting, self._views(), self._clock(), 0, self._block_keys) if waiting else None
        return len(waiting) if isinstance(step, Dispatch) else 0

    def usable(self) -> NoRoute | None:
        """None when some pair could take work, at once or later; else why not."""
        return no_pair(self._views())

    def changed(self) -> None:
        """What is known of some engine is not what it was."""
        usable = self.usable() is None
        if usable or self._was_usable:
            self._usable_at = self._clock()
        self._was_usable = usable
        self.pump()

    def _views(self) -> list[Engine]:
        return [link.view for link in self._links.values()]

    async def prepare(self, wanted: Wanted) -> None:
        """Compute a long prompt's block keys off the event loop (0.15 s for a million tokens), where they matter."""
        if len(wanted.tokens) < LONG_PROMPT:
            return
        for hello, load in [(view.hello, view.load) for view in self._views()]:
            if hello is None or load is None or not load.block_keys:
                continue
            place = (hello.fingerprint, hello.page_tokens)
            if place not in wanted.keys:
                keys = await asyncio.to_thread(self._block_keys, place[0], wanted.tokens, place[1])
                wanted.keys[place] = keys

    def enter(self, tries: list[Wanted], deadline: float) -> list[Ticket]:
        """Queue all choices of a new request, or none: 429 when the queue is full, 503 without a pair to wait for."""
        lacking = self.usable()
        if lacking is not None and not self._may_wait():
            raise errors.unavailable(f"No pair of engines can take this request: {lacking.detail}.")
        if not fits(len(self._tickets), len(tries), self._limit):
            raise errors.queue_full(self._limit)
        waiting = _num_tokens(ticket.waiting.wanted for ticket in self._tickets)
        if waiting and waiting + _num_tokens(tries) > MOST_QUEUED_TOKENS:
            raise errors.queue_full_of_tokens(MOST_QUEUED_TOKENS)
        tickets = []
        for wanted in tries:
            tickets.append(self._add(Waiting(self._next_order, deadline, wanted)))
            self._next_order += 1
        self.pump()
        return tickets

    def _may_wait(self) -> bool:
        """The engines that are known now do not matter: a fleet that dies and comes back is told anew, and may be empty
        between."""
        now = self._clock()
        if may_wait(self._usable_at, now, self._outage_s):
            return True
        return any(link.is_new for link in self._links.values()) and may_wait(self._began_at, now, self._outage_s)

    def enter_again(self, waiting: Waiting) -> Ticket:
        """Queue a retry, in its old place. It is never refused."""
        ticket = self._add(waiting)
        self.pump()
        return ticket

    def _add(self, waiting: Waiting) -> Ticket:
        ticket = Ticket(waiting, self._clock())
        insort(self._tickets, ticket, key=lambda t: t.waiting.order)
        return ticket

    async def placed(self, ticket: Ticket) -> Placement:
        """Wait for the ticket's place. Raises the ApiError of a missed deadline; a cancelled wait leaves nothing."""
        ticket.claimed = True
        try:
            return await ticket.future
        except asyncio.CancelledError:
            self.withdraw(ticket)
            raise

    def drop(self, ticket: Ticket) -> None:
        """Withdraw a ticket that was never waited for."""
        if not ticket.claimed:
            self.withdraw(ticket)

    def withdraw(self, ticket: Ticket) -> None:
        if ticket in self._tickets:
            self._tickets.remove(ticket)
        future = ticket.future
        if future.done() and not future.cancelled() and future.exception() is None:
            self.release(future.result())
        future.cancel()

    def release(self, placement: Placement) -> None:
        placement.release_prefill()
        placement.decode.end(placement.decode_epoch)
        self.running -= 1
        self.pump()

    def suspect(self, address: str) -> None:
        """A fault points at this engine: others are preferred until it answers again."""
        link = self._links.get(address)
        if link is not None:
            link.suspect()

    def prefilled(self, placement: Placement) -> None:
        """The first token came: the prefill side has room again."""
        if placement.prefill is not None:
            placement.release_prefill()
            self.pump()

    def pump(self) -> None:
        """Place the entries that can go, end those that are too late, sleep until time alone changes something."""
        if not self._tickets:
            return
        now = self._clock()
        self._expire(now)
        while self._tickets:
            waiting = [ticket.waiting for ticket in self._tickets]
            step = next_dispatch(waiting, self._views(), now, self._random.getrandbits(32), self._block_keys)
            if not isinstance(step, Dispatch):
                self._reason = step.reason
                break
            self._place(step)
        self._sleep(now)

    def _place(self, step: Dispatch) -> None:
        index = next(i for i, ticket in enumerate(self._tickets) if ticket.waiting is step.waiting)
        ticket = self._tickets.pop(index)
        if ticket.future.done():
            return
        decode = self._links[step.pair.decode.member.address]
        placement = Placement(step.pair, decode, decode.begin())
        if step.pair.prefill is not None:
            placement.prefill = self._links[step.pair.prefill.member.address]
            placement.prefill_epoch = placement.prefill.begin()
        self.running += 1
        self.dispatched += 1
        self._latencies.queue.add(self._clock() - ticket.since)
        ticket.future.set_result(placement)

    def _expire(self, now: float) -> None:
        late = {id(entry) for entry in expired((t.waiting for t in self._tickets), now)}
        if not late:
            return
        for ticket in self._tickets:
            if id(ticket.waiting) in late and not ticket.future.done():
                ticket.future.set_exception(self._too_late(now - ticket.since))
        self._tickets = [t for t in self._tickets if id(t.waiting) not in late]

    def _too_late(self, waited: float) -> errors.ApiError:
        reason = self._reason or NoRoute("NoRoom", "the queue did not move")
        if reason.reason == NO_PAIR:
            return errors.unavailable(f"No pair of engines came up in time: {reason.detail}.")
        return errors.deadline_exceeded(waited, reason.detail)

    def _sleep(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = wake_at((ticket.waiting for ticket in self._tickets), now)
        if at is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.001, at - now), self.pump)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _num_tokens(wanted: Iterable[Wanted]) -> int:
    """Of these prompts, each once: the choices of a request share theirs."""
    return sum(len(prompt) for prompt in {id(each.tokens): each.tokens for each in wanted}.values())
