"""The gateway's connection to one engine: Hello, one Attach stream, Load polls, and the tries that run over it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic

from sluice_gateway.routing.engine import ClientFactory, EngineClient, EngineLost
from sluice_gateway.routing.fleet import DOWN, Engine, Member
from sluice_gateway.routing.reasons import ENGINE_LOST, SOURCE_LOST
from sluice_gateway.routing.report import Known
from sluice_gateway.routing.session import Lost, Push, Session, Try, TryResult
from sluice_gateway.status.histograms import Latencies
from sluice_protocol.generate import EngineHello, GenerateRequest, Refused

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Timings:
    """`load_timeout_s`: an engine whose Load takes longer gets no new work. `sick_s`: one that does not answer, or is
    not ready, loses what runs on it after so long, when another pair can take it; one in quarantine in any case, for
    nothing comes back from there. `silent_s`: so does one that has not answered for so long, whatever engines are
    left."""

    load_every_s: float = 0.2
    load_timeout_s: float = 1.5
    sick_s: float = 3.0
    silent_s: float = 120.0
    # A reader forgets a source that was not named for ten minutes.
    name_sources_every_s: float = 60.0
    tokens_timeout_s: float = 15.0
    first_backoff_s: float = 0.05
    most_backoff_s: float = 1.0


class Link:
    """`run` keeps the connection up for as long as it is not cancelled; `on_change` is called when `view` changed.

    `is_new`: it has neither answered a Load yet nor refused or lost the connection; one that is down may still come.
    `last_hello` is that of the last life that was usable, also while nothing listens there. `leaning`: tries on other
    engines that wait for this one's prefill. `elsewhere`: whether some pair without this engine could take work.
    `sources`: addresses that an engine which says this Hello may be sent to for records.
    """

    def __init__(
        self,
        member: Member,
        clients: ClientFactory,
        gateway_id: str,
        on_change: Callable[[], None],
        timings: Timings,
        elsewhere: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = monotonic,
        latencies: Latencies | None = None,
        sources: Callable[[EngineHello], tuple[str, ...]] = lambda hello: (),
    ) -> None:
        self._sources = sources
        self._clock = clock
        self._latencies = latencies
        self._loaded_at = 0.0
        self.member = member
        self._clients = clients
        self._gateway_id = gateway_id
        self._on_change = on_change
        self._timings = timings
        self._session: Session | None = None
        self._since_poll = 0
        self._suspect = False
        self._poll_now = asyncio.Event()
        self._epoch = 0
        self._elsewhere = elsewhere
        self._sick_since: float | None = None
        self.leaning: set[Try] = set()
        self.view = Engine(member, trouble=f"{DOWN}: {member.down}" if member.down else "NotConnected")
        self.is_new = True
        self.last_hello: EngineHello | None = None

    def known(self, now: float) -> Known:
        """For a report to the operator."""
        p95_ms = 0.0 if self._session is None else self._session.gaps.p95_ms(now)
        return Known(self.view, now - self._loaded_at if self.view.load is not None else 0.0, p95_ms)

    def begin(self) -> int:
        """A try of ours begins here, which Load does not know of yet. Returns what `end` wants to hear."""
        self._count(1)
        return self._epoch

    def end(self, epoch: int) -> None:
        """It ended. Tries of an earlier connection are not counted any more."""
        if epoch == self._epoch:
            self._count(-1)

    def _count(self, change: int) -> None:
        """Four times a request: `dataclasses.replace` takes longer than all else here."""
        self._since_poll += change
        seen = self.view
        self.view = Engine(seen.member, seen.hello, seen.load, seen.own + change, seen.trouble, seen.suspect)

    async def run(self) -> None:
        if self.member.down:  # until the fleet says otherwise, which makes another member of it
            return
        backoff = self._timings.first_backoff_s
        while True:
            client: EngineClient | None = None
            try:
                client = self._clients(self.member)
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
                self._reset(f"{type(error).__name__}: {error}")
            finally:
                await self._close(client)
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, self._timings.most_backoff_s)

    async def _close(self, client: EngineClient | None) -> None:
        try:
            if client is not None:
                await client.close()
        except Exception:
            logger.exception("connection to %s", self.member.address)

    async def _serve(self, client: EngineClient) -> None:
        hello = await client.hello()
        session = Session(client, hello, self._clock, self._latencies)
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

    async def _read(self, session: Session) -> None:
        async for batch in session.client.attach(self._gateway_id):
            session.attached.set()
            session.deliver(batch)
        raise EngineLost(f"{self.member.address}: the Attach stream ended")

    async def _poll(self, session: Session) -> None:
        """A Load that does not come stops new work; what runs goes elsewhere in a while, if there is an elsewhere.

        The engine sends an empty batch first: then its tokens have a way here, and not before.
        """
        await session.attached.wait()
        named: tuple[str, ...] = ()
        named_at = 0.0
        while True:
            self._since_poll = 0
            self._suspect = False
            asked_at = asyncio.get_running_loop().time()
            sources = self._sources(session.hello)
            is_news = sources != named or asked_at - named_at > self._timings.name_sources_every_s
            try:
                async with asyncio.timeout(self._timings.load_timeout_s):
                    load = await session.client.load(sources if is_news else ())
            except (EngineLost, TimeoutError) as error:
                self._show(replace(self.view, trouble=f"NoLoad: {str(error) or 'it does not answer'}"))
            else:
                if load.incarnation != session.hello.incarnation:
                    raise EngineLost(f"{self.member.address}: restarted as {load.incarnation}")
                if is_news:
                    named, named_at = sources, asked_at
                self._session = session
                self.is_new = False
                self.last_hello = session.hello
                self._loaded_at = self._clock()
                self._show(Engine(self.member, session.hello, load, self._since_poll, suspect=self._suspect))
            self._fail_over(session, asked_at)
            await self._pause()

    @property
    def is_sick(self) -> bool:
        """Nothing that runs here is known to make progress. An engine that drains finishes what it has."""
        load = self.view.load
        is_away = load is not None and load.not_ready and not load.draining
        return bool(self.view.trouble) or is_away or (load is not None and load.quarantined)

    def _fail_over(self, session: Session, asked_at: float) -> None:
        """A stuck engine ends nothing by itself, and its supervisor takes its budget before it does: requests that
        another pair can take do not wait for that. An engine that drains finishes what it has."""
        load = self.view.load
        is_held = load is not None and load.quarantined
        since = self._sick_since = (self._sick_since or asked_at) if self.is_sick else None
        if since is None:
            return
        sick_s = asyncio.get_running_loop().time() - since
        is_silent = bool(self.view.trouble) and self._clock() - self._loaded_at >= self._timings.silent_s
        if sick_s < self._timings.sick_s or not (is_held or is_silent or self._elsewhere()):
            return
        why = f"{self.member.address}: {self.view.unusable}"
        session.fail_all(Lost(ENGINE_LOST, why))
        for attempt in list(self.leaning):
            attempt.fail(Lost(SOURCE_LOST, why))

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
        self.is_new = False
        if session is not None:
            session.fail_all(Lost(ENGINE_LOST, why))
        if session is not None or self.view.trouble != why:
            self._epoch += 1
            self._show(Engine(self.member, trouble=why))

    async def attempt(
        self, request: GenerateRequest, push: Push, on_first: Callable[[], None], source: Link | None = None
    ) -> TryResult:
        """One try. Leaving it, by whatever way, ends the work on the engine. `source`: the link to the engine that
        prefills for it."""
        session = self._session
        if session is None:
            return Lost(ENGINE_LOST, f"{self.member.address}: {self.view.trouble}", has_begun=False)

        def first() -> None:
            if source is not None:
                source.leaning.discard(attempt)
            on_first()

        attempt = session.begin(request, push, first, is_handed_over=source is not None)
        if source is not None:
            source.leaning.add(attempt)
        try:
            return await self._follow(attempt)
        except EngineLost as error:
            if self._session is session:
                self.suspect()
            return attempt.lost or Lost(ENGINE_LOST, str(error))
        finally:
            session.end(attempt)
            if source is not None:
                source.leaning.discard(attempt)

    def suspect(self) -> None:
        """A broken try is often the first sign of a death: others go first until a Load that was asked for after it."""
        if self._session is not None:
            self._suspect = True
            self._poll_now.set()
            self._show(replace(self.view, suspect=True))

    async def _follow(self, attempt: Try) -> TryResult:
        reply = await attempt.call.reply()
        if reply is None:
            return attempt.lost or Lost(ENGINE_LOST, f"{self.member.address}: the Generate call was cancelled")
        if isinstance(reply, Refused):
            return reply
        lost = await attempt.wait_for(reply.num_tokens, self._timings.tokens_timeout_s)
        return lost or reply
