"""Engines and gateways over gRPC, as the operator. The only file of the operator that knows gRPC.

Every call is bounded in time, all pods of a deployment are asked at once, and nothing is raised: a pod that does not
answer is one of which nothing is known.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio

from sluice_operator.decide.observed import Load, Pod
from sluice_operator.live.fleet import (
    Contact,
    Heard,
    asked_engines,
    asked_gateways,
    read_load,
    read_report,
    read_status,
)
from sluice_operator.names import PodRole
from sluice_operator.render import ports
from sluice_protocol import codec
from sluice_protocol.fleet import FleetReport
from sluice_protocol.generate import SCHEMA_VERSION
from sluice_protocol.v1 import engine_pb2, engine_pb2_grpc, fleet_pb2, fleet_pb2_grpc
from sluice_runtime.address import join
from sluice_runtime.probe_client import NoAnswer, ask_json
from sluice_runtime.rpc.options import KEY_HEADER, OPTIONS, RECONNECT
from sluice_runtime.tls.client import open_channel
from sluice_runtime.tls.identity import Identity
from sluice_runtime.tls.peers import Peer

CALL_S = 1.0
# Of a pod that nobody asked for so long; it is gone, or its deployment is.
UNUSED_S = 120.0
# A channel with TLS takes 100 to 200 KiB: 3,000 pods of 300 deployments, 100 MiB with so many kept, 180 with 1,000. Of
# more, those that were used last stay, and the others are opened again when their deployment is looked at.
MAX_KEPT = 500
# One slow fleet must not take all the sockets there are.
MAX_IN_FLIGHT = 128
_CHANNEL_OPTIONS = [*OPTIONS, *RECONNECT]
log = logging.getLogger(__name__)
T = TypeVar("T")

Identify = Callable[[Contact], Identity | None]
"""As whom to come to the pods of a deployment; None: in plain text, with the key alone."""

Dial = Callable[[str, int], str]
"""IP address and port of a pod -> where to connect, host:port."""


def by_certificate(contact: Contact) -> Identity | None:
    return contact.identity


def plaintext(_contact: Contact) -> Identity | None:
    return None


class LiveFleet:
    """Channels are kept while they are used."""

    def __init__(self, identify: Identify = by_certificate, dial: Dial = join, call_s: float = CALL_S) -> None:
        self._identify, self._dial, self._call_s = identify, dial, call_s
        self._channels: dict[str, _Kept] = {}
        self._retired: list[_Kept] = []
        self._slots = asyncio.Semaphore(MAX_IN_FLIGHT)

    async def look(self, contact: Contact, pods: Iterable[Pod]) -> Heard:
        await self._close_unused()
        pods = [pod for pod in pods if pod.name in contact.addresses]
        engines, gateways = asked_engines(pods), asked_gateways(pods)
        loads_told, reports_told = await asyncio.gather(
            asyncio.gather(*(self._load(contact, pod) for pod in engines)),
            asyncio.gather(*(self._report(contact, pod) for pod in gateways)),
        )
        loads = {pod.name: load for pod, load in zip(engines, loads_told) if load is not None}
        reports = tuple(
            read_report(pod.name, time.time(), report, contact, loads)
            for pod, report in zip(gateways, reports_told)
            if report is not None
        )
        return Heard(loads, reports)

    async def drain(self, contact: Contact, pod: Pod) -> None:
        if pod.name not in contact.addresses:
            return
        address = self._dial(contact.addresses[pod.name], ports.ENGINE)

        async def ask() -> None:
            stub: Any = engine_pb2_grpc.EngineStub(self._channel(contact, pod.role, address))
            told = codec.decode_drained(await stub.Drain(engine_pb2.DrainRequest(), **self._how(contact)))
            log.info("%s drains: it has %d sequences and %d ms", pod.name, told.remaining, told.left_ms)

        await self._asked(f"drain of {pod.name}", ask())

    async def close(self) -> None:
        channels = [kept.channel for kept in (*self._channels.values(), *self._retired)]
        self._channels.clear()
        self._retired.clear()
        await asyncio.gather(*(channel.close(None) for channel in channels), return_exceptions=True)

    # -- one call each ------------------------------------------------------------------------------------------------

    async def _load(self, contact: Contact, pod: Pod) -> Load | None:
        address = self._dial(contact.addresses[pod.name], ports.ENGINE)

        async def ask() -> Load:
            stub: Any = engine_pb2_grpc.EngineStub(self._channel(contact, pod.role, address))
            reply = await stub.Load(engine_pb2.LoadRequest(), **self._how(contact))
            return read_load(codec.decode_load(reply))

        told = await self._asked(f"load of {pod.name}", ask())
        if told is None and not pod.ready:
            # A leader that is stuck or dead answers nobody, but its supervisor does.
            return await self._status(contact, pod)
        return told

    async def _status(self, contact: Contact, pod: Pod) -> Load | None:
        url = f"http://{self._dial(contact.addresses[pod.name], ports.PROBE)}"
        try:
            return read_status(await ask_json(url, "/status", self._call_s))
        except NoAnswer as error:
            log.debug("status of %s: %s", pod.name, error)
            return None

    async def _report(self, contact: Contact, pod: Pod) -> FleetReport | None:
        address = self._dial(contact.addresses[pod.name], ports.CONTROL)

        async def ask() -> FleetReport:
            stub: Any = fleet_pb2_grpc.FleetStub(self._channel(contact, pod.role, address))
            request = fleet_pb2.ReportRequest(schema_version=SCHEMA_VERSION)
            return codec.decode_fleet_report(await stub.Report(request, **self._how(contact)))

        return await self._asked(f"report of {pod.name}", ask())

    def _how(self, contact: Contact) -> Mapping[str, Any]:
        return {"timeout": self._call_s, "metadata": ((KEY_HEADER, contact.key),)}

    async def _asked(self, what: str, call: Awaitable[T]) -> T | None:
        """None for whatever keeps an answer from coming."""
        try:
            async with self._slots:
                return await call
        except grpc.aio.AioRpcError as error:
            log.debug("%s: %s: %s", what, error.code().name, error.details())
        except codec.MalformedMessage as error:
            log.warning("%s: %s", what, error)
        return None

    # -- channels -----------------------------------------------------------------------------------------------------

    def _channel(self, contact: Contact, role: PodRole, address: str) -> grpc.aio.Channel:
        """A new one when our certificate is another: pods believe the old one no longer than they have to."""
        identity, now = self._identify(contact), time.monotonic()
        kept = self._channels.get(address)
        if kept is None or kept.identity is not identity:
            if kept is not None:
                self._retired.append(kept)
            channel = open_channel(address, Peer(role.value), identity, _CHANNEL_OPTIONS)
            kept = self._channels[address] = _Kept(channel, identity, now)
        kept.used_at = now
        return kept.channel

    async def _close_unused(self) -> None:
        """Calls end within `call_s`, so nothing runs on what was not used for so long."""
        now = time.monotonic()
        then, idle_since = now - UNUSED_S, now - 2 * self._call_s
        excess = max(0, len(self._channels) - MAX_KEPT)
        too_many = set(heapq.nsmallest(excess, self._channels, key=lambda address: self._channels[address].used_at))
        old = [
            address
            for address, kept in self._channels.items()
            if kept.used_at < then or (address in too_many and kept.used_at < idle_since)
        ]
        unused = [self._channels.pop(address) for address in old] + [
            kept for kept in self._retired if kept.used_at < then
        ]
        self._retired = [kept for kept in self._retired if kept.used_at >= then]
        for kept in unused:
            await kept.channel.close(None)


@dataclass(slots=True)
class _Kept:
    """`used_at`: monotonic seconds."""

    channel: grpc.aio.Channel
    identity: Identity | None
    used_at: float
