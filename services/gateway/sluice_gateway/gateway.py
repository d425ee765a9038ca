"""The gateway itself: a checked request becomes choices, these run, and their ends become one answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

from sluice_gateway.http.bodies import Body, BodyBudget
from sluice_gateway.http.keep_alive import Life
from sluice_gateway.openai import errors
from sluice_gateway.openai.client_names import ClientNames
from sluice_gateway.openai.requests import Limits, Options
from sluice_gateway.routing.answer import Choice, Outcome
from sluice_gateway.routing.board import StatusBoard
from sluice_gateway.routing.dispatch import Clock, Dispatcher
from sluice_gateway.routing.engine import ClientFactory
from sluice_gateway.routing.fleet import load_report
from sluice_gateway.routing.jobs import Job, output_budget
from sluice_gateway.routing.lack import describe_queue
from sluice_gateway.routing.members import Members, watch_fleet
from sluice_gateway.routing.report import make_report
from sluice_gateway.routing.route import BlockKeys, Wanted
from sluice_gateway.routing.story import Story
from sluice_gateway.settings import Settings
from sluice_gateway.status.counters import Counters
from sluice_gateway.status.histograms import Latencies
from sluice_gateway.status.marks import TURN_S, GatewayMarks
from sluice_gateway.text.detokenize import Pieces
from sluice_gateway.text.encoding import Kind
from sluice_gateway.text.large_requests import LargeRequests
from sluice_gateway.text.prepare import Preparation, Prepared
from sluice_gateway.text.tokenizer import END_THINK, Tokenizer
from sluice_gateway.text.track import Sink, Track, TrackPlan
from sluice_protocol.fleet import FleetReport
from sluice_protocol.generate import EngineHello, GenerateRequest, Role
from sluice_protocol.outputs import OutputLimit
from sluice_protocol.sampling import Sampling
from sluice_runtime.health.recorder import Recorder
from sluice_runtime.rpc.self_call import SelfCall
from sluice_runtime.tls.keeper import IdentityKeeper
from sluice_runtime.tracing import NO_TRACER, Tracer

logger = logging.getLogger(__name__)

UNKNOWN_CONTEXT = 1 << 20


@dataclass(frozen=True, slots=True)
class _Known:
    hellos: list[EngineHello]
    limits: Limits
    fingerprint: str


def _fingerprint_of(hellos: list[EngineHello]) -> str:
    return f"fp_{hellos[0].fingerprint.digest.hex()[:12]}" if hellos else "fp_none"


class Gateway:
    """Everything with a life of its own hangs here: links, dispatcher, counters."""

    def __init__(
        self,
        settings: Settings,
        tokenizer: Tokenizer,
        clients: ClientFactory,
        clock: Clock,
        random: Random,
        block_keys: BlockKeys,
        tracer: Tracer = NO_TRACER,
        recorder: Recorder | None = None,
        identity: IdentityKeeper | None = None,
    ) -> None:
        self.settings = settings
        self.identity = identity
        self.marks = GatewayMarks(recorder)
        self.tokenizer = tokenizer
        self.tracer = tracer
        self.pieces = Pieces(tokenizer)
        self.counters = Counters()
        self.bodies = BodyBudget(settings.held_body_bytes)
        self.large = None if settings.worker is None else LargeRequests(settings.worker, self.counters, clock)
        self.preparation = Preparation(tokenizer, self.marks, self.large, self.limits, self.counters, clock)
        self.random = random
        self.stopping = False
        self._clock = clock
        self.latencies = Latencies()
        self.members = Members(
            clients, settings.gateway_id, self._changed, settings.timings, self._has_pair, clock, self.latencies
        )
        self.dispatcher = Dispatcher(
            self.members.links, clock, settings.max_queued, settings.outage_s, random, block_keys, self.latencies
        )
        self.board = StatusBoard(self.report, settings.supervisor, clock)
        self._kept: list[asyncio.Task[None]] = []
        self._turn: asyncio.TimerHandle | None = None
        self._met = asyncio.Event()
        self._last_known: _Known | None = None
        self._running: set[asyncio.Task[Any]] = set()

    def _changed(self) -> None:
        self._known()  # to be kept for when no engine is there
        self.dispatcher.changed()
        if self._has_pair():
            self._met.set()

    async def meet(self, within_s: float) -> bool:
        """Wait for a first pair that could take work; False when there is none within the time."""
        try:
            async with asyncio.timeout(within_s):
                await self._met.wait()
        except TimeoutError:
            return False
        return True

    def _has_pair(self) -> bool:
        return self.dispatcher.usable() is None

    async def start(self) -> None:
        self.marks.begin()
        self._take_turn()
        self.members.set_fleet(self.settings.fleet)
        if self.settings.fleet_file is not None:
            watching = watch_fleet(self.settings.fleet_file, self.members.set_fleet, self.settings.fleet_poll_s)
            self._keep(watching, "fleet file")
        if self.marks.are_read:
            calling = SelfCall(self.marks.grpc)
            await calling.open()
            self._keep(calling.run(), "calls to itself")

    def _keep(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """For as long as this gateway lives: the end of such a task would otherwise go unseen."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._ended)
        self._kept.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            logger.error("%s has ended", task.get_name(), exc_info=task.exception())
            self.marks.end(failed=f"{task.get_name()} has ended: {task.exception()!r}")

    def _take_turn(self) -> None:
        """For ever. An event loop logs the error of a callback and forgets it: that would be a silent end."""
        try:
            self.marks.turn(self.dispatcher.placeable(), self.dispatcher.dispatched, self._mirror)
            if self.identity is not None:
                self.identity.look()
                self.marks.identity(self.identity.describe())
        except Exception as error:
            self.marks.end(failed=f"a turn of the loop: {error!r}")
            raise
        self._turn = asyncio.get_running_loop().call_later(TURN_S, self._take_turn)

    async def close(self) -> None:
        if self._turn is not None:
            self._turn.cancel()
            self.marks.end()
        for task in self._kept:
            task.cancel()
        await asyncio.gather(*self._kept, return_exceptions=True)
        if self.large is not None:
            await self.large.close()
        await self.members.close()
        await asyncio.to_thread(self.tracer.close)
        self.dispatcher.close()

    def limits(self) -> Limits:
        """From the engines that are known, also while they are away; before any is, from the tokenizer."""
        return self._known().limits

    def context_tokens(self) -> int | None:
        """Of prompt and answer together; None before any engine has said it."""
        known = self._known()
        return known.limits.max_context_tokens if known.hellos else None

    def _known(self) -> _Known:
        """What follows from the engines' hellos, which are the same for many requests. While no engine is known it is
        what followed from the last ones."""
        hellos = self._hellos()
        if self._last_known is None or (hellos and self._last_known.hellos != hellos):
            self._last_known = _Known(hellos, self._limits_of(hellos), _fingerprint_of(hellos))
        return self._last_known

    def _limits_of(self, hellos: list[EngineHello]) -> Limits:
        serving = [hello for hello in hellos if hello.role is not Role.PREFILL]
        return Limits(
            vocab_size=min((hello.vocab_size for hello in serving), default=self.tokenizer.vocab_size),
            max_context_tokens=min((hello.max_context_tokens for hello in hellos), default=UNKNOWN_CONTEXT),
            max_choices=self.settings.max_choices,
            defaults=self.settings.sampling_defaults,
            efforts=self.settings.efforts.paragraphs,
        )

    def _hellos(self) -> list[EngineHello]:
        return [link.last_hello for link in self.members.links.values() if link.last_hello is not None]

    # -- from a body to a checked request, and to a job

    async def prepare(self, body: Body, kind: Kind, deadline_s: float) -> Prepared:
        """Raises ApiError."""
        return await self.preparation.prepare(body, kind, deadline_s)

    async def job(self, prepared: Prepared, deadline_s: float, request_id: str, names: ClientNames) -> Job:
        """Raises ApiError. `deadline_s`: from the arrival of the request's body; the job has what is left of it."""
        prompts = await prepared.encode()
        deadline_s = max(0.0, deadline_s - (self._clock() - prepared.began_at))
        limits, options = self.limits(), prepared.options
        default, field = (None, "messages") if prepared.kind is Kind.CHAT else (16, "prompt")
        max_tokens = tuple(output_budget(options, len(prompt), limits, default, field) for prompt in prompts)
        if not prepared.is_checked and max(map(max, prompts)) >= limits.vocab_size:
            raise errors.unknown_token()
        seed = self.random.getrandbits(63) if options.seed is None else options.seed % 2**64
        return Job(
            options, prompts, max_tokens, seed, prepared.thinking, deadline_s, request_id, prepared.began_at, names
        )

    # -- from a job to its end

    def new_life(self) -> Life:
        """Of a request whose body has been read: that is its first sign of progress."""
        return Life(self._clock, self.settings.pace.evidence_s)

    async def run(self, job: Job, make_sink: Callable[[int], Sink], life: Life | None = None) -> list[Outcome]:
        """Run all choices to their end, in order of index. Raises the first ApiError, once nothing of the job runs.
        `life` hears of the choices."""
        if self.stopping:
            raise errors.unavailable("The gateway is shutting down.", "shutting_down")
        requests = [self._request(job, index) for index in range(job.num_choices)]
        choices = [
            Choice(
                request,
                job.deadline_s,
                self.settings.fault_budget,
                job.began_at,
                self._track(job, request.sampling, make_sink(index)),
                self.dispatcher,
                self._clock,
                self.random,
                self.counters,
                self.latencies,
                Story(request.request_id, len(request.prompt_ids), self.tracer, job.names),
            )
            for index, request in enumerate(requests)
        ]
        if life is not None:
            life.signs = [choice.moves for choice in choices]
        for prompt in job.prompts:
            self.latencies.prompt_tokens.add(len(prompt))
        by_prompt = [Wanted(prompt) for prompt in job.prompts]
        for entry in by_prompt:
            await self.dispatcher.prepare(entry)
        wanted = [entry for entry in by_prompt for _ in range(job.options.n)]
        tickets = self.dispatcher.enter(wanted, self._clock() + job.deadline_s)
        tasks = [asyncio.create_task(choice.run(ticket)) for choice, ticket in zip(choices, tickets)]
        self._running.update(tasks)
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            if not all(task.done() for task in tasks):
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            self._running.difference_update(tasks)
            for ticket in tickets:
                self.dispatcher.drop(ticket)

    def _request(self, job: Job, index: int) -> GenerateRequest:
        """Of one choice, before it has a pair."""
        prompt_index, choice = divmod(index, job.options.n)
        options = job.options
        sampling = replace(
            options.sampling,
            seed=job.seed,
            choice=choice,
            stop_token_ids=tuple(sorted(self._stop_ids(options))),
            max_tokens=job.max_tokens[prompt_index],
        )
        return GenerateRequest(
            f"{job.request_id}-{index}", self.settings.gateway_id, job.prompts[prompt_index], (), sampling
        )

    def _stop_ids(self, options: Options) -> frozenset[int]:
        eos = frozenset() if options.ignore_eos else self.tokenizer.eos_ids
        return eos | frozenset(options.stop_token_ids)

    def _track(self, job: Job, sampling: Sampling, sink: Sink) -> Track:
        plan = TrackPlan(
            limit=OutputLimit.of(sampling),
            stop=job.options.stop,
            end_think=self.tokenizer.markers.get(END_THINK) if job.thinking else None,
            top_logprobs=job.options.sampling.top_logprobs,
        )
        return Track(plan, self.pieces, sink)

    # -- what people and probes ask

    def system_fingerprint(self) -> str:
        """Of the engines that are known; tells answers of two models apart."""
        return self._known().fingerprint

    def not_ready(self) -> str:
        """Why no request can be served; empty when one can."""
        lacking = self.dispatcher.usable()
        return "shutting down" if self.stopping else "" if lacking is None else lacking.detail

    def report(self) -> dict[str, Any]:
        engines = [
            {
                "role": link.view.role.value if link.view.role else "engine",
                "address": link.member.address,
                "pid": link.view.hello.pid if link.view.hello else None,
                "trouble": link.view.unusable,
                "suspect": link.view.suspect,
                "health": "" if link.last_hello is None else link.last_hello.health_address,
                "load": load_report(link.view.load),
            }
            for link in self.members.links.values()
        ]
        return {
            "model": self.settings.model_name,
            "ready": not self.not_ready(),
            "reason": self.not_ready(),
            "queued": self.dispatcher.queued,
            "running": self.dispatcher.running,
            "counters": asdict(self.counters),
            "engines": engines,
        }

    def _mirror(self) -> dict[str, Any]:
        """What its supervisor makes metrics of."""
        return self.report() | {"histograms": self.latencies.report()}

    def fleet_report(self) -> FleetReport:
        """For the operator."""
        now = self._clock()
        queue = describe_queue(self.dispatcher.waiting(), [link.view for link in self.members.links.values()])
        links = [link.known(now) for link in self.members.links.values()]
        return make_report(self.settings.gateway_id, not self.not_ready(), self.dispatcher.running, queue, links)

    def stop(self) -> None:
        """End what still runs: the clients are told so."""
        self.stopping = True
        if self.large is not None:
            self.large.fail_all(errors.unavailable("The gateway is shutting down.", "shutting_down"))
        for task in self._running:
            task.cancel("shutting down")
