"""The operator's life: wait for the CRD, win the lease, watch and reconcile until told to stop or until it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from sluice_operator.api.crd import KIND
from sluice_operator.decide.lease import Timing
from sluice_operator.live.cluster import KINDS, Cluster, ClusterError
from sluice_operator.live.connection import Connection
from sluice_operator.live.election import Election, Leadership, clock
from sluice_operator.live.ending import end, stop_on_signals
from sluice_operator.live.fleet import Fleet
from sluice_operator.live.handlers import WATCHED, Shell
from sluice_operator.live.observe import Observer
from sluice_operator.live.probes import Answer, Probes
from sluice_operator.live.reconcile import Reconciler
from sluice_operator.live.work import Work
from sluice_operator.render.revision import Renderer

CRD_POLL_S = 2.0
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
READY_STATES = ("standby", "leading")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Options:
    """`namespaces`: ("",) for all. `identity`: like no other replica's, ever. `may_see_nodes`: see Observer.
    `lease_name`: of the replicas of one release, and of no other's."""

    identity: str
    lease_namespace: str
    lease_name: str = "sluice-operator"
    namespaces: tuple[str, ...] = ("",)
    may_see_nodes: bool = False
    resync_s: float = 60.0
    timing: Timing = dataclasses.field(default_factory=Timing)
    probe_host: str = ""  # every address
    probe_port: int = 0


class Operator:
    def __init__(self, connection: Connection, options: Options, renderer: Renderer, fleet: Fleet) -> None:
        self.options, self.connection = options, connection
        self.leadership = Leadership(options.timing)
        self.work = Work(asyncio.get_running_loop().time)
        call_s = options.timing.call
        self.cluster = Cluster(connection, call_s, self.leadership.check)
        # Renewing is what a lease that is about to be lost needs most: it has its own connection and no check.
        self.lease_cluster = Cluster(connection, call_s, lambda: None)
        lease = (options.lease_namespace, options.lease_name, options.identity)
        self.election = Election(self.lease_cluster, *lease, self.leadership)
        observer = Observer(self.cluster, fleet, renderer, options.may_see_nodes)
        self.reconciler = Reconciler(self.cluster, fleet, renderer, observer, self.work)
        self.shell = Shell(connection, self.work, call_s, self._can_watch)
        self.probes = Probes(self.answer)
        self.state = "starting"

    async def run(self) -> None:
        """Returns after SIGTERM or SIGINT, the lease given back."""
        stop = asyncio.Event()
        stop_on_signals(stop)
        async with self.cluster, self.lease_cluster:
            port = await self.probes.start(self.options.probe_host, self.options.probe_port)
            log.info("probes on port %d", port)
            try:
                if await _unless(stop, self._prepare()):
                    await self._lead(stop)
            finally:
                await self.probes.stop()
                await self.election.give_back()

    async def _prepare(self) -> None:
        self.state = "waiting for the CRD"
        while True:
            if await self._readable():
                break
            await asyncio.sleep(CRD_POLL_S)
        self.state = "standby"
        await self.election.win()

    async def _readable(self) -> tuple[str, ...]:
        """Namespaces whose ModelDeployments can be listed."""
        return tuple([namespace for namespace in self.options.namespaces if await self._can_list(namespace)])

    async def _can_list(self, namespace: str) -> bool:
        try:
            return await self.cluster.find(KINDS[KIND].path(namespace)) is not None
        except ClusterError as error:
            log.warning("%s: the ModelDeployments cannot be listed: %s", namespace or "all namespaces", error)
            return False

    async def _can_watch(self, namespace: str) -> bool:
        """All kinds: one watch that is refused would end those of all namespaces. Where nobody can be asked, it may."""
        for kind in (KIND, *WATCHED):
            review = {"spec": {"resourceAttributes": {"namespace": namespace, "verb": "watch", **KINDS[kind].resource}}}
            try:
                told = await self.lease_cluster.call("POST", REVIEWS, review)  # no write, whatever its verb
            except ClusterError as error:
                log.warning("what may be watched is not known: %s", error)
                return True
            if not told.get("status", {}).get("allowed", True):
                log.warning(
                    "%s: %s may not be watched, so it is only looked at every %.0f s",
                    namespace or "all namespaces",
                    KINDS[kind].plural,
                    self.options.resync_s,
                )
                return False
        return True

    async def _lead(self, stop: asyncio.Event) -> None:
        self.state = "leading"
        log.info("leading as %s", self.options.identity)
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(self.election.keep()), asyncio.create_task(stop.wait())]
        try:
            watchable = await self._watchable()
            resync = self.reconciler.resync(self.options.namespaces, self.options.resync_s, self.shell.compare)
            # The watches end when told to stop, and otherwise only when they cannot go on.
            works = (self.reconciler.run(), resync, self.shell.run(stop, watchable))
            tasks += [asyncio.create_task(work) for work in works]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await end(tasks)

    async def _watchable(self) -> tuple[str, ...]:
        """All there are where none can be: the watches then say why."""
        readable = await self._readable()
        may = await asyncio.gather(*map(self._can_watch, readable))
        return tuple(name for name, is_so in zip(readable, may) if is_so) or self.options.namespaces

    def answer(self) -> Answer:
        counts, problem = self.reconciler.counts, ""
        if self.state == "standby" and clock() - self.election.looked_at > self.options.timing.duration:
            problem = "standby, and the lease could not be read for longer than it lasts"
        running, running_s = self.work.longest_running
        if running is not None and running_s > 2 * self.reconciler.bound_s:
            problem = f"{'/'.join(running)} has been looked at for {running_s:.0f} s and cannot be cut off"
        facts = {
            "state": self.state,
            "identity": self.options.identity,
            "lease_age_s": None if self.leadership.held_at is None else round(self.leadership.age, 3),
            "queue": self.work.depth,
            "queue_age_s": round(self.work.lateness, 3),
            "running_s": round(running_s, 3),
            "last_look_s": None if counts.looked_at is None else round(time.monotonic() - counts.looked_at, 3),
            "lost": dict(counts.lost),
            "reconciles": counts.reconciles,
            "failures": dict(counts.failures),
            "actions": dict(counts.actions),
            "reconcile_s": round(counts.took_s, 3),
            "slowest_reconcile_s": round(counts.slowest_s, 3),
            "requests": dict(self.cluster.requests + self.lease_cluster.requests),
            "errors": dict(self.cluster.errors + self.lease_cluster.errors),
        }
        return Answer(problem, facts, "" if self.state in READY_STATES else self.state)


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do `work` unless told to stop before; whether it was done."""
    task = asyncio.create_task(work)
    waiter = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((task, waiter), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        for each in (task, waiter):
            each.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await each
