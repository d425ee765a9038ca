"""The gateway's connection to one engine: Hello, one Attach stream, Load polls, and the tries that run over it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sluice_gateway.engine import ClientFactory, EngineClient, EngineLost, GenerateCall
from sluice_gateway.fleet import Engine, Member
from sluice_gateway.reasons import ENGINE_LOST, TOKENS_LOST
from sluice_protocol.generate import Admitted, Ended, EngineHello, GenerateRequest, Refused, TokenBatch
from sluice_protocol.sampling import TokenLogprobs

logger = logging.getLogger(__name__)

Logprobs = Sequence[TokenLogprobs | None] | None
Push = Callable[[Sequence[int], Logprobs], bool]
"""Takes the next tokens of a try, with one logprobs entry each if asked for. True: no more are wanted."""

SUSPECT = "TryBroke"
EARLY_TOKENS = 65_536
"""Tokens kept, per engine, of streams whose Admitted was not seen yet."""


@dataclass(frozen=True, slots=True)
class Timings:
    load_every_s: float = 0.2
    tokens_timeout_s: float = 15.0
    first_backoff_s: float = 0.05
    most_backoff_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Lost:
    """A try that ended without a word from the engine."""

    reason: str
    detail: str


TryResult = Ended | Refused | Lost


class _Try:
    """One Generate call and the tokens that belong to it."""

    def __init__(self, call: GenerateCall, push: Push, on_first: Callable[[], None]) -> None:
        self.call = call
        self.received = 0
        self.lost: Lost | None = None
        self.stream: int | None = None
        self._push = push
        self._on_first = on_first
        self._enough: asyncio.Event | None = None
        self._target = 0

    def deliver(self, tokens: Sequence[int], logprobs: Logprobs) -> None:
        if not self.received:
            self._on_first()
        self.received += len(tokens)
        try:
            if self._push(tokens, logprobs):
                self.call.cancel()
        except Exception as error:  # input ends its own stream only
            logger.exception("a token could not be handled")
            self.fail(Lost("GatewayFailed", repr(error)))
        if self._enough is not None and self.received >= self._target:
            self._enough.set()

    def fail(self, lost: Lost) -> None:
        self.lost = self.lost or lost
        self.call.cancel()
        if self._enough is not None:
            self._enough.set()

    async def wait_for(self, num_tokens: int, timeout_s: float) -> Lost | None:
        """Return once so many tokens came; what went wrong, if they did not."""
        if self.received < num_tokens and self.lost is None:
            self._target, self._enough = num_tokens, asyncio.Event()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._enough.wait()
            except TimeoutError:
                return Lost(TOKENS_LOST, f"{self.received} of {num_tokens} tokens came")
        if self.received > num_tokens:
            return Lost(TOKENS_LOST, f"{self.received} tokens came, {num_tokens} were announced")
        return self.lost if self.received < num_tokens else None


class _Session:
    """What lives from one Hello to the loss of the Attach stream."""

    def __init__(self, client: EngineClient, hello: EngineHello) -> None:
        self.client = client
        self.hello = hello
        self.attached = asyncio.Event()
        self.tries: set[_Try] = set()
        self._streams: dict[int, _Try] = {}
        self._early: dict[int, list[tuple[Sequence[int], Logprobs]]] = {}
        self._num_early = 0
        self._over: dict[int, None] = {}

    def deliver(self, batch: TokenBatch) -> None:
        tokens, at = batch.tokens, 0
        by_index = dict(batch.logprobs) if batch.logprobs else None
        for stream, count in zip(batch.streams, batch.counts):
            row = tokens[at : at + count]
            logprobs = None if by_index is None else [by_index.get(i) for i in range(at, at + count)]
            at += count
            attempt = self._streams.get(stream)
            if attempt is not None:
                attempt.deliver(row, logprobs)
            elif stream not in self._over:
                self._keep(stream, row, logprobs)

    def _keep(self, stream: int, row: Sequence[int], logprobs: Logprobs) -> None:
        """Bounded: the oldest stream goes first; if it turns up after all, its missing tokens fail the try."""
        self._early.setdefault(stream, []).append((row, logprobs))
        self._num_early += len(row)
        while self._num_early > EARLY_TOKENS:
            oldest = next(iter(self._early))
            self._num_early -= sum(len(rows) for rows, _ in self._early.pop(oldest))

    def admit(self, attempt: _Try, stream: int) -> None:
        attempt.stream = stream
        self._streams[stream] = attempt
        for row, logprobs in self._early.pop(stream, ()):
            self._num_early -= len(row)
            attempt.deliver(row, logprobs)

    def end(self, attempt: _Try) -> None:
        """Late tokens of an ended stream are dropped; the memory of such streams is bounded."""
        self.tries.discard(attempt)
        attempt.call.cancel()
        if attempt.stream is not None:
            self._streams.pop(attempt.stream, None)
            self._over[attempt.stream] = None
            if len(self._over) > 4096:
                del self._over[next(iter(self._over))]

    def fail_all(self, lost: Lost) -> None:
        for attempt in list(self.tries):
            attempt.fail(lost)


class Link:
    """`run` keeps the connection up for as long as it is not cancelled; `on_change` is called when `view` changed."""

    def __init__(
        self, member: Member, clients: ClientFactory, gateway_id: str, on_change: Callable[[], None], timings: Timings
    ) -> None:
        self.member = member
        self._clients = clients
        self._gateway_id = gateway_id
        self._on_change = on_change
        self._timings = timings
        self._session: _Session | None = None
        self._since_poll = 0
        self._suspect = False
        self._poll_now = asyncio.Event()
        self._epoch = 0
        self.view = Engine(member, trouble="NotConnected")

    def begin(self) -> int:
        """A try of ours begins here, which Load does not know of yet. Returns what `end` wants to hear."""
        self._count(1)
        return self._epoch

    def end(self, epoch: int) -> None:
        """It ended. Tries of an earlier connection are not counted any more."""
        if epoch == self._epoch:
            self._count(-1)

    def _count(self, change: int) -> None:
        self._since_poll += change
        self.view = replace(self.view, own=self.view.own + change)

    async def run(self) -> None:
        backoff = self._timings.first_backoff_s
        while True:
            client = self._clients(self.member.address)
            try:
                await self._serve(client)
            except EngineLost as error:
                if self._session is not None:
                    logger.warning("engine %s lost: %s", self.member.address, error)
                    backoff = self._timings.first_backoff_s
                self._reset(str(error))
            except asyncio.CancelledError:
                self._reset("the gateway closed the connection")
                raise
            except Exception as error:  # a defect of ours ends this connection, never the loop
                logger.exception("connection to %s", self.member.address)
                self._reset(repr(error))
            finally:
                await client.close()
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, self._timings.most_backoff_s)

    async def _serve(self, client: EngineClient) -> None:
        hello = await client.hello()
        session = _Session(client, hello)
        tasks = [asyncio.create_task(self._read(session)), asyncio.create_task(self._poll(session))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if any(task.cancelled() for task in done):
                raise EngineLost(f"{self.member.address}: a reader was cancelled from outside")
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, session: _Session) -> None:
        async for batch in session.client.attach(self._gateway_id):
            session.attached.set()
            session.deliver(batch)
        raise EngineLost(f"{self.member.address}: the Attach stream ended")

    async def _poll(self, session: _Session) -> None:
        """A Load that does not come stops new work; only the end of Attach ends what runs.

        The engine sends an empty batch first: then its tokens have a way here, and not before.
        """
        await session.attached.wait()
        while True:
            self._since_poll = 0
            self._suspect = False
            try:
                load = await session.client.load()
            except EngineLost as error:
                self._show(replace(self.view, trouble=f"NoLoad: {error}"))
            else:
                if load.incarnation != session.hello.incarnation:
                    raise EngineLost(f"{self.member.address}: restarted as {load.incarnation}")
                self._session = session
                trouble = SUSPECT if self._suspect else ""
                self._show(Engine(self.member, session.hello, load, self._since_poll, trouble))
            await self._pause()

    async def _pause(self) -> None:
        """Not `wait_for`: it loses a cancel that comes together with the event (Python < 3.12)."""
        try:
            async with asyncio.timeout(self._timings.load_every_s):
                await self._poll_now.wait()
        except TimeoutError:
            return
        self._poll_now.clear()

    def _show(self, view: Engine) -> None:
        self.view = view
        self._on_change()

    def _reset(self, why: str) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.fail_all(Lost(ENGINE_LOST, why))
        if session is not None or self.view.trouble != why:
            self._epoch += 1
            self._show(Engine(self.member, trouble=why))

    async def attempt(self, request: GenerateRequest, push: Push, on_first: Callable[[], None]) -> TryResult:
        """One try. Leaving it, by whatever way, ends the work on the engine."""
        session = self._session
        if session is None:
            return Lost(ENGINE_LOST, f"{self.member.address}: {self.view.trouble}")
        attempt = _Try(session.client.generate(request), push, on_first)
        session.tries.add(attempt)
        try:
            return await self._follow(session, attempt)
        except EngineLost as error:
            if self._session is session:
                self.suspect()
            return attempt.lost or Lost(ENGINE_LOST, str(error))
        finally:
            session.end(attempt)

    def suspect(self) -> None:
        """A broken try is often the first sign of a death: no new work until a Load that was asked for after it."""
        if self._session is not None:
            self._suspect = True
            self._poll_now.set()
            self._show(replace(self.view, trouble=SUSPECT))

    async def _follow(self, session: _Session, attempt: _Try) -> TryResult:
        async for event in attempt.call:
            if isinstance(event, Admitted):
                session.admit(attempt, event.stream)
            elif isinstance(event, Refused):
                return event
            else:
                lost = await attempt.wait_for(event.num_tokens, self._timings.tokens_timeout_s)
                return lost or event
        return attempt.lost or Lost(ENGINE_LOST, f"{self.member.address}: the Generate stream ended early")
