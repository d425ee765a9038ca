"""The NIXL transport, READ only. The one module that imports nixl; it belongs into the sidecar, never into an engine.

Why it is as it is: `shared/facts/nixl.md`. NIXL has no abort, so handles are polled to the end and only terminal ones
released; it has no fork, so a forked child of an agent's process ends at once; its environment is ours alone.

Two mappings of the same memory are registered: a writable one, for READs that we post, and a read-only one. Only the
read-only one is in the metadata that a source hands out (`get_partial_agent_metadata`), so a peer that tries to WRITE
is told NotFound for the one, and hits pages without write permission through the other. A reader hands out nothing.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from sluice_engine.pool import Pools
from sluice_engine.transfer.contract import DONE, PENDING, Failure, Handle, Outcome
from sluice_engine.transfer.errors import BadPeer, HandleMisuse, PeerLost, TransferUnavailable
from sluice_engine.transfer.plan import Piece
from sluice_engine.transfer.seal import open_seal
from sluice_protocol.source import SourceHello
from sluice_records import RecordKind
from sluice_runtime import fault_points

# How often NIXL's progress thread looks without being told (docs/adr/0110). Over TCP it must, now and then: UCX misses
# wake-ups. By CMA nothing comes that it would miss, and every look is a wake-up of this process.
PROGRESS_DELAY_US = 1000
CMA_PROGRESS_DELAY_US = 10_000
# Of a ping's READ, at most.
PING_BYTES = 64 * 1024
_Ranges = list[tuple[int, int, int]]
# What a forked child of this process exits with, at once.
FORK_EXIT = 70
# NIXL's exceptions have no base of their own but Exception (1.5.1), so calls into it are wrapped in that, one by one.
_PACKAGES = ("nixl_cu13", "nixl_cu12")


@dataclass(frozen=True, slots=True)
class NixlSettings:
    """`lanes`: the value of `UCX_TLS`, see `lanes.py`. `one_host`: all peers are on this machine, use loopback."""

    lanes: str
    one_host: bool = False
    tcp_port_range: str = ""

    def environment(self) -> dict[str, str]:
        told = {
            "UCX_TLS": self.lanes,
            "UCX_LOG_LEVEL": "error",
            "NIXL_LOG_LEVEL": "ERROR",
            # An unreadable $HOME, or a user's ~/.nixl.cfg, must not decide anything.
            "NIXL_CONFIG_FILE": os.devnull,
        }
        if self.one_host:
            told["UCX_NET_DEVICES"] = "lo"
        if self.tcp_port_range:
            told["UCX_TCP_PORT_RANGE"] = self.tcp_port_range
        return told


def load_nixl(settings: NixlSettings) -> ModuleType:
    """Import nixl under our environment and none of the user's. Raises TransferUnavailable; call once a process."""
    for name in [name for name in os.environ if name.startswith(("UCX_", "NIXL_"))]:
        del os.environ[name]
    os.environ.update(settings.environment())
    logging.getLogger("nixl").setLevel(logging.WARNING)
    problems = []
    for package in _PACKAGES:
        try:
            module = importlib.import_module(package)
            bindings = importlib.import_module(f"{package}._bindings")
        except (ImportError, OSError, RuntimeError) as error:
            problems.append(f"{package}: {error}")
            continue
        _patch_progress_delay(bindings)
        _guard_forks()
        return module
    raise TransferUnavailable(
        f"NIXL does not load ({'; '.join(problems)}); install nixl-cu13, or choose the byte stream"
    )


def _patch_progress_delay(bindings: Any) -> None:
    """The wrapper hard-codes a delay of 0, which spins: a core per idle agent."""

    class PatientConfig(bindings.nixlAgentConfig):  # type: ignore[misc, name-defined]
        delay_us = PROGRESS_DELAY_US

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, self.delay_us if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = PatientConfig


def _guard_forks() -> None:
    """A forked child that runs destructors kills the agent of its parent; one that ends at once does not."""

    def end_child() -> None:
        os.write(2, b"sluice transfer: this process owns a NIXL agent and must not fork; the child ends\n")
        os._exit(FORK_EXIT)

    os.register_at_fork(after_in_child=end_child)


def create_agent(nixl: ModuleType, name: str, progress_delay_us: int = PROGRESS_DELAY_US) -> Any:
    """UCX only, strict locking, a progress thread. Raises TransferUnavailable."""
    importlib.import_module(f"{nixl.__name__}._bindings").nixlAgentConfig.delay_us = progress_delay_us
    try:
        config = nixl.nixl_agent_config(
            backends=["UCX"],
            enable_prog_thread=True,
            enable_listen_thread=False,
            sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        agent = nixl.nixl_agent(name, config)
    except Exception as error:
        raise TransferUnavailable(f"NIXL makes no agent: {type(error).__name__}: {error}") from error
    if "UCX" not in agent.backends:
        raise TransferUnavailable("NIXL has no UCX backend")
    return agent


@dataclass(slots=True)
class _Peer:
    hello: SourceHello
    bases: Mapping[RecordKind, int]
    open: bool = True
    in_flight: int = 0


@dataclass(slots=True)
class _Posted:
    peer: str
    raw: Any
    outcome: Outcome
    # Into scratch memory: wherever its bytes land, no record has them, so an error ends it.
    is_ping: bool = False


class NixlTransfer:
    name = "nixl"
    splits_records = True

    def __init__(
        self,
        nixl: ModuleType,
        agent_name: str,
        key: bytes,
        destinations: Pools | None,
        sources: Pools | None,
        *,
        progress_delay_us: int = PROGRESS_DELAY_US,
    ) -> None:
        """`destinations` are mapped writable, None where nothing is ever pulled. `sources` are the same records in a
        read-only mapping, which is all that the metadata names; None: this process only reads and has no metadata."""
        self.agent_name = agent_name
        self._key = key
        self._agent = create_agent(nixl, agent_name, progress_delay_us)
        # Keeps the mappings: registered memory must never be unmapped.
        self._mapped = (destinations, sources)
        _, self._bases = self._register(destinations or {})
        registered, self.source_bases = self._register(sources or {})
        # Where a ping's bytes go; they are not read.
        self._scratch = np.zeros(PING_BYTES, dtype=np.uint8)
        self._agent.register_memory([(int(self._scratch.ctypes.data), PING_BYTES, 0, "")], "DRAM")
        self.metadata = b""
        if registered is not None:
            self.metadata = bytes(self._agent.get_partial_agent_metadata(registered, True, ["UCX"]))
        self._peers: dict[str, _Peer] = {}
        # Agent names ever seen and the incarnation that had them: a name is good for one.
        self._names: dict[str, str] = {}
        self._posted: dict[Handle, _Posted] = {}
        self._next = 0
        # Errors of NIXL that leave a handle in limbo.
        self.troubles: Counter[str] = Counter()

    def attach(self, peer: SourceHello) -> None:
        known = self._peers.get(peer.incarnation)
        if known is not None and known.open:
            if known.hello != peer:
                raise BadPeer(f"{peer.incarnation!r} now says something else than at first")
            return
        if known is not None and known.in_flight:
            raise PeerLost(f"{peer.incarnation!r} was lost and still has {known.in_flight} transfers in flight")
        metadata = open_seal(peer, self._key)
        self._check(peer)
        self._names[peer.agent_name] = peer.incarnation
        try:
            told = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise BadPeer(f"{peer.incarnation!r}: metadata refused: {type(error).__name__}") from error
        told = told.decode() if isinstance(told, bytes) else str(told)
        if told != peer.agent_name:
            if told not in self._names:
                self._agent.remove_remote_agent(told)
            raise BadPeer(f"metadata of {peer.agent_name!r} is {told!r}'s")
        self._peers[peer.incarnation] = _Peer(peer, {RecordKind(pool.kind): pool.base for pool in peer.pools})

    def detach(self, peer: str) -> None:
        known = self._peers.get(peer)
        if known is not None:
            known.open = False
            self._remove_when_quiet(peer, known)

    def post(self, piece: Piece) -> Handle:
        peer = self._peers.get(piece.peer)
        if peer is None or not peer.open:
            raise PeerLost(f"{piece.peer!r} is not attached")
        ours = [(self._bases[run.kind] + run.destination, run.nbytes, 0) for run in piece.runs]
        theirs = [(peer.bases[run.kind] + run.source, run.nbytes, 0) for run in piece.runs]
        return self._note(piece.peer, peer, *self._read(piece.peer, peer, ours, theirs))

    def ping(self, peer: str) -> Handle | None:
        known = self._peers.get(peer)
        if known is None or not known.open:
            raise PeerLost(f"{peer!r} is not attached")
        pool = min(known.hello.pools, key=lambda pool: pool.record_bytes)
        nbytes = min(pool.record_bytes, PING_BYTES)
        ours, theirs = [(int(self._scratch.ctypes.data), nbytes, 0)], [(pool.base, nbytes, 0)]
        return self._note(peer, known, *self._read(peer, known, ours, theirs, is_ping=True), is_ping=True)

    def poll(self, handle: Handle) -> Outcome:
        posted = self._get(handle)
        if fault_points.holds("sidecar.complete"):
            return PENDING
        if posted.outcome is PENDING:
            try:
                posted.outcome = _outcome(self._agent.check_xfer_state(posted.raw))
            except Exception as error:
                failure = self._failed(posted.peer, error)
                is_end = failure.reason == "PeerLost" or posted.is_ping
                posted.outcome = failure if is_end else self._limbo(failure)
        return posted.outcome

    def release(self, handle: Handle) -> None:
        posted = self._get(handle)
        if posted.outcome is PENDING:
            raise HandleMisuse(f"handle {handle} is in flight")
        if posted.raw is not None:
            self._agent.release_xfer_handle(posted.raw)
        del self._posted[handle]
        peer = self._peers.get(posted.peer)
        if peer is not None:
            peer.in_flight -= 1
            self._remove_when_quiet(posted.peer, peer)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _register(self, pools: Pools) -> tuple[Any, dict[RecordKind, int]]:
        """(registration, addresses). Pools without records have neither."""
        used = {kind: pool.buffer for kind, pool in pools.items() if pool.num_records}
        rows = [(int(buffer.ctypes.data), int(buffer.nbytes), 0, "") for buffer in used.values()]
        registered = self._agent.register_memory(rows, "DRAM") if rows else None
        return registered, {kind: int(buffer.ctypes.data) for kind, buffer in used.items()}

    def _check(self, peer: SourceHello) -> None:
        if peer.transport != self.name:
            raise BadPeer(f"{peer.incarnation!r} moves records by {peer.transport!r}, we by {self.name!r}")
        if self._names.get(peer.agent_name, peer.incarnation) != peer.incarnation:
            raise BadPeer(f"{peer.agent_name!r} was another incarnation's name")
        if not peer.pools:
            raise BadPeer(f"{peer.incarnation!r} has no pools to read from")
        for pool in peer.pools:
            if pool.record_bytes <= 0 or pool.num_records <= 0:
                raise BadPeer(f"{peer.incarnation!r} has no {pool.kind} records")
            if pool.memory != "DRAM":
                raise BadPeer(f"{peer.incarnation!r} has {pool.kind} records in {pool.memory}, which we cannot read")

    def _note(self, name: str, peer: _Peer, raw: Any, outcome: Outcome, *, is_ping: bool = False) -> Handle:
        self._next += 1
        handle = Handle(self._next)
        self._posted[handle] = _Posted(name, raw, outcome, is_ping)
        peer.in_flight += 1
        return handle

    def _read(
        self, name: str, peer: _Peer, ours: _Ranges, theirs: _Ranges, *, is_ping: bool = False
    ) -> tuple[Any, Outcome]:
        """The raw handle (None when none was made) and how far it got at once. Ranges are (address, bytes, device)."""
        raw = None
        try:
            raw = self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs(ours, "DRAM"),
                self._agent.get_xfer_descs(theirs, "DRAM"),
                peer.hello.agent_name,
            )
            outcome = _outcome(self._agent.transfer(raw))
        except Exception as error:
            outcome = self._failed(name, error)
            is_end = raw is None or is_ping or outcome.reason == "PeerLost"
            return raw, outcome if is_end else self._limbo(outcome)
        return raw, outcome

    def _failed(self, name: str, error: Exception) -> Failure:
        kind = type(error).__name__
        if kind == "nixlRemoteDisconnectError":
            # The endpoint is broken for good; the same metadata, attached again, makes a new one.
            peer = self._peers.get(name)
            if peer is not None:
                peer.open = False
            return Failure("PeerLost", f"{name!r}: {error}")
        return Failure("TransferFailed", f"{name!r}: {kind}: {error}")

    def _limbo(self, failure: Failure) -> Outcome:
        """A broken connection ends everything on it. Any other error may be one descriptor's, while others of the
        same handle go on: such a handle is never called terminal, and its records end up stranded."""
        self.troubles[failure.detail] += 1
        return PENDING

    def _remove_when_quiet(self, name: str, peer: _Peer) -> None:
        if not peer.open and not peer.in_flight:
            self._agent.remove_remote_agent(peer.hello.agent_name)
            del self._peers[name]

    def _get(self, handle: Handle) -> _Posted:
        if handle not in self._posted:
            raise HandleMisuse(f"handle {handle} does not exist")
        return self._posted[handle]


def _outcome(state: str) -> Outcome:
    """Errors are exceptions; whatever else it might say is no end."""
    return DONE if state == "DONE" else PENDING
