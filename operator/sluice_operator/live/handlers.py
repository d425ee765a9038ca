"""kopf as the watch shell: an event only names a ModelDeployment to look at. No timers, daemons or finalizers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import kopf

from sluice_operator import names
from sluice_operator.api.crd import GROUP, PLURAL, VERSION
from sluice_operator.live.cluster import KINDS
from sluice_operator.live.connection import Connection
from sluice_operator.live.ending import end, stop_on_signals
from sluice_operator.live.work import Key, Work

# What is watched beside the ModelDeployments themselves; the rest is put right by the resync.
WATCHED = ("Deployment", "Pod", "Service", "NetworkPolicy", "PodDisruptionBudget")

# kopf reconnects a watch without a sign of life after 70 s.
SILENT_S = 120.0


class WatchSilent(Exception):
    """Changes that a listing shows do not come through a watch, or will not: only a new process helps."""


class Shell:
    """Watches, and remembers which version of each ModelDeployment it was told of last. `can_watch`: a namespace."""

    def __init__(
        self, connection: Connection, work: Work, call_s: float, can_watch: Callable[[str], Awaitable[bool]]
    ) -> None:
        self.connection, self.work, self.call_s, self.can_watch = connection, work, call_s, can_watch
        self.watched: tuple[str, ...] = ()
        self._told: dict[Key, int] = {}
        self._listed: dict[Key, int] = {}
        self._listed_at = time.monotonic()
        self.registry = kopf.OperatorRegistry()
        self.settings = self._settings()
        kopf.on.login(registry=self.registry)(self._login)
        kopf.on.event(GROUP, VERSION, PLURAL, registry=self.registry)(self._on_deployment)
        for kind in WATCHED:
            group, _, version = KINDS[kind].api_version.rpartition("/")
            kopf.on.event(group, version, KINDS[kind].plural, registry=self.registry)(self._on_child)

    async def run(self, stop: asyncio.Event, namespaces: tuple[str, ...]) -> None:
        """Until `stop`, SIGTERM or SIGINT. `namespaces`: those that can be read now, for one that cannot ends all
        watches. Raises WatchSilent as soon as any of them ends.

        Kopf's own end of it is not waited for: it waits for all its tasks, and a watch may swallow that it was
        cancelled. What is left ends with the process."""
        self.watched = namespaces
        where = {"clusterwide": True} if namespaces == ("",) else {"namespaces": namespaces}
        tasks = await kopf.spawn_tasks(
            registry=self.registry, settings=self.settings, standalone=True, stop_flag=stop, **where
        )
        stop_on_signals(stop)  # kopf has taken them over, and its answer to one may never come to an end
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end(tasks)
        if not stop.is_set():
            raise WatchSilent(f"the watches have ended: {', '.join(sorted(map(_why, done)))}")

    def _settings(self) -> kopf.OperatorSettings:
        settings = kopf.OperatorSettings()
        settings.posting.enabled = False
        settings.peering.standalone = True
        # No right to see namespaces or CRDs is needed; __main__ waits for the CRD.
        settings.scanning.disabled = True
        settings.networking.request_timeout = self.call_s
        settings.networking.connect_timeout = self.call_s
        settings.watching.connect_timeout = self.call_s
        # Against watches that have gone silent: both ends give up now and then.
        settings.watching.server_timeout = 300
        settings.watching.client_timeout = 310
        # Filtered by the API server: pods of others never come here.
        for kind in WATCHED:
            group, _, version = KINDS[kind].api_version.rpartition("/")
            settings.watching.label_selectors[group, version, KINDS[kind].plural] = names.LABEL_DEPLOYMENT
        return settings

    async def _login(self, **_: Any) -> kopf.ConnectionInfo:
        told = self.connection
        return kopf.ConnectionInfo(
            server=told.server,
            ca_data=told.ca.encode() or None,
            certificate_data=told.certificate.encode() or None,
            private_key_data=told.key.encode() or None,
            token=told.bearer() or None,
        )

    async def compare(self, listed: Mapping[Key, int], readable: Collection[str]) -> None:
        """`listed`: versions, live, of the namespaces `readable`. Raises WatchSilent when one that was listed SILENT_S
        ago was never told of, or when a namespace can be watched that is not."""
        for namespace in sorted(set(readable) - set(self.watched)) if self.watched else ():
            if await self.can_watch(namespace):
                raise WatchSilent(f"namespace {namespace} can be watched, which it could not be when the watches began")
        listed = {
            key: version for key, version in listed.items() if self.watched in ((), ("",)) or key[0] in self.watched
        }
        if time.monotonic() - self._listed_at < SILENT_S:
            return
        missed = sorted(k for k, version in self._listed.items() if k in listed and self._told.get(k, 0) < version)
        if missed:
            raise WatchSilent(f"the watch of {PLURAL} is silent: no news of {missed[0][0]}/{missed[0][1]}")
        self._listed, self._listed_at = dict(listed), time.monotonic()
        self._told = {key: version for key, version in self._told.items() if key in listed}

    async def _on_deployment(self, meta: Mapping[str, Any], **_: Any) -> None:
        key = meta["namespace"], meta["name"]
        self._told[key] = max(self._told.get(key, 0), int(meta["resourceVersion"]))
        self.work.add(key)

    async def _on_child(self, meta: Mapping[str, Any], **_: Any) -> None:
        name = meta.get("labels", {}).get(names.LABEL_DEPLOYMENT)
        if name:
            self.work.add((meta["namespace"], name))


def _why(task: asyncio.Task[Any]) -> str:
    """Of one that has ended."""
    error = None if task.cancelled() else task.exception()
    return f"{task.get_name()}: {error!r}" if error is not None else task.get_name()
