"""observe -> plan -> apply, for one ModelDeployment at a time. Level-based: not what happened counts, but what is."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sluice_operator.api.crd import KIND
from sluice_operator.api.enums import ScalingMode
from sluice_operator.api.spec import ModelDeploymentSpec
from sluice_operator.api.status import ModelDeploymentStatus
from sluice_operator.decide.accept import parse
from sluice_operator.decide.actions import Action, Remember, Tell, WriteStatus
from sluice_operator.decide.observed import Observed
from sluice_operator.decide.plan import Parsed, defect, first_memory, plan
from sluice_operator.decide.reasons import Reason
from sluice_operator.keys.keyring import Keyring
from sluice_operator.live.apply import Applier
from sluice_operator.live.cluster import KINDS, Cluster, ClusterError, Failed, Forbidden, Invalid, Refused
from sluice_operator.live.fleet import Fleet
from sluice_operator.live.observe import Known, Observer
from sluice_operator.live.work import Key, Work
from sluice_operator.render.revision import Renderer

WORKERS = 8
# Seconds to the next look: after a change, while something is awaited, when all is well.
BUSY_S, AWAITED_S, QUIET_S = 2.0, 5.0, 60.0
# All that is awaited, when it is much, in looks a second.
AWAITED_PER_S = 10.0
# All that one look waits for is bounded by itself. Should anything not be, its ModelDeployment would wait for ever.
RECONCILE_S = 120.0
# What only tells: it is done also after a refusal, for the rest may build on what was refused.
TELLS = WriteStatus | Tell | Remember
# Of a write: somebody has to do something about it, and is told what. Any other answer may be of the moment (the API
# server is busy, somebody else was faster), unless it comes this often: a webhook may answer with any code.
REFUSALS = Forbidden | Invalid | Failed
OFTEN = 5
Compare = Callable[[Mapping[Key, int], Collection[str]], Awaitable[None]]
"""Versions of the ModelDeployments that are listed, and the namespaces that could be."""
log = logging.getLogger(__name__)


@dataclass
class Counts:
    """Since the start; `slowest_s`: of one reconcile, `took_s`: of all. `looked_at`: of the last full listing, by
    time.monotonic, and `lost`: namespaces that it could not list, and why."""

    reconciles: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    actions: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    took_s: float = 0.0
    looked_at: float | None = None
    lost: dict[str, str] = field(default_factory=dict)


class Reconciler:
    def __init__(
        self,
        cluster: Cluster,
        fleet: Fleet,
        renderer: Renderer,
        observer: Observer,
        work: Work,
        bound_s: float = RECONCILE_S,
    ) -> None:
        self.cluster, self.fleet, self.renderer = cluster, fleet, renderer
        self.observer, self.work, self.bound_s = observer, work, bound_s
        self.counts = Counts()
        self._known: dict[Key, Known] = {}
        self._awaiting: set[Key] = set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(WORKERS):
                group.create_task(self._worker())

    async def resync(self, namespaces: tuple[str, ...], every_s: float, compare: Compare) -> None:
        """All there are, live, now and again: what a watch has missed is made up for. `compare` may raise.

        A namespace that cannot be listed holds up no other; what is known of it is left alone meanwhile."""
        while True:
            lists = {name: items for name in namespaces if (items := await self._listed(name)) is not None}
            if len(lists) == len(namespaces):
                self.counts.looked_at = time.monotonic()
            if lists:
                items = [item for part in lists.values() for item in part]
                versions = {_key(item): int(item["metadata"]["resourceVersion"]) for item in items}
                await compare(versions, lists.keys())
                for key in self._known.keys() - versions.keys():
                    if key[0] in lists or "" in lists:
                        self.work.add(key)
                for key in versions:
                    if key in self._known:
                        self._known[key].secrets.clear()
                        # Somebody may have replaced the key's Secret.
                        self._known[key].contact = replace(self._known[key].contact, key="")
                    # Not all at once.
                    self.work.add(key, random.uniform(0.0, min(every_s, 0.02 * len(items))))
            await asyncio.sleep(every_s)

    async def _listed(self, namespace: str) -> list[Any] | None:
        try:
            items: list[Any] = await self.cluster.items(KIND, namespace)
        except ClusterError as error:
            log.warning("resync of %s: %s", namespace or "all namespaces", error)
            self.counts.lost[namespace] = type(error).__name__
            return None
        self.counts.lost.pop(namespace, None)
        return items

    async def _worker(self) -> None:
        while True:
            key = await self.work.take()
            began = time.monotonic()
            try:
                async with asyncio.timeout(self.bound_s):
                    again_s = await self.reconcile(key)
            except TimeoutError:
                # What it has done stays done, and the next look goes on from there. The trace says where it stood.
                log.exception("%s/%s: a reconcile that takes longer than %.0f s is cut off", *key, self.bound_s)
                self._failed(key, "Stuck")
            except ClusterError as error:
                log.warning("%s/%s: %s", *key, error)
                self._failed(key, type(error).__name__)
            except (Exception, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and _is_being_ended():
                    raise
                # One ModelDeployment that nobody can make sense of must not stop the others; it is counted and told.
                # Nor must a library's cancelled future, which would end this worker without a word and keep its key.
                log.exception("%s/%s", *key)
                self._failed(key, "Defect")
            else:
                self.work.done(key, again_s)
            self.counts.reconciles += 1
            took_s = time.monotonic() - began
            self.counts.took_s += took_s
            self.counts.slowest_s = max(self.counts.slowest_s, took_s)

    def _failed(self, key: Key, reason: str) -> None:
        self.counts.failures[reason] += 1
        self.work.failed(key)

    async def reconcile(self, key: Key) -> float | None:
        """Seconds to the next look; None: it is gone. Raises ClusterError."""
        namespace, name = key
        item = await self.cluster.find(KINDS[KIND].path(namespace, name))
        if item is None or "deletionTimestamp" in item["metadata"]:
            self._known.pop(key, None)
            self._awaiting.discard(key)
            return None
        known = self._known.get(key)
        if known is None or known.uid != item["metadata"]["uid"]:
            fresh = first_memory(time.time())
            known = self._known[key] = Known(item["metadata"]["uid"], fresh, Keyring(namespace, name))
        parsed = parse(name, item.get("spec"), is_newer=True)
        spec = parsed if isinstance(parsed, ModelDeploymentSpec) else None
        observed = await self.observer.observe(item, spec, known)
        moved = await self._carry_out(self._planned(parsed, observed), observed, known)
        if known.refused:  # no longer: status has to hear of it
            known.refused, moved = "", True
        if moved:
            return BUSY_S
        self._awaiting.discard(key)
        if not _is_awaiting(spec, observed.status):
            return QUIET_S
        self._awaiting.add(key)
        return max(AWAITED_S, len(self._awaiting) / AWAITED_PER_S)

    async def _carry_out(self, actions: Iterable[Action], observed: Observed, known: Known) -> bool:
        """Whether anything has changed. Raises ClusterError; a refusal once all that tells is done, and it is noted."""
        applier = Applier(self.cluster, self.fleet, observed, known)
        moved, refused = False, None
        for action in actions:
            if refused is not None and not isinstance(action, TELLS):
                continue
            try:
                outcome = await applier.obey(action)
            except ClusterError as error:
                if isinstance(action, Tell):  # at best effort: nobody waits for an Event
                    log.warning("%s/%s: %s: %s", observed.namespace, observed.name, action, error)
                    continue
                if isinstance(action, TELLS) or not _is_refusal(action, error, known):
                    raise
                refused = error
                continue
            if outcome.stale is not None:
                if isinstance(action, TELLS) or not _is_refusal(action, outcome.stale, known):
                    return True
                refused = outcome.stale
                continue
            self.counts.actions[type(action).__name__] += 1
            moved = moved or not outcome.idle
        if refused is not None:
            known.refused = f"{known.turned_away[0]}: {refused}"
            raise refused
        known.turned_away = ("", 0)
        return moved

    def _planned(self, parsed: Parsed, observed: Observed) -> tuple[Action, ...]:
        """A spec over which we fail is told of as one that is refused: silence would help nobody."""
        try:
            return plan(parsed, observed, time.time(), self.renderer)
        except Exception as error:
            log.exception("%s/%s: no plan", observed.namespace, observed.name)
            self.counts.failures["Defect"] += 1
            return plan((defect(error),), observed, time.time(), self.renderer)


def _is_refusal(action: Action, error: ClusterError, known: Known) -> bool:
    """Or something that passes. Counts how often this action has been turned away, look after look."""
    what, times = str(action), 1
    if known.turned_away[0] == what:
        times += known.turned_away[1]
    known.turned_away = (what, times)
    return isinstance(error, REFUSALS) or (isinstance(error, Refused) and times >= OFTEN)


def _is_awaiting(spec: ModelDeploymentSpec | None, status: ModelDeploymentStatus) -> bool:
    """Whether something may change that no watch tells of: an engine's load, the end of a drain, whom a gateway routes
    to, a node, a stranger's object that goes."""
    if spec is not None and spec.decode.scaling.mode is ScalingMode.AUTO:
        return True
    progress = next((c.reason for c in status.conditions if c.type == "Progressing"), "")
    return bool(status.reason) or progress not in (Reason.COMPLETE, Reason.PAUSED)


def _is_being_ended() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _key(item: Mapping[str, Any]) -> Key:
    return item["metadata"]["namespace"], item["metadata"]["name"]
