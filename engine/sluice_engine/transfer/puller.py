"""The transfer poller's state machine, one per reader. No I/O of its own, no clock: time is an argument.

    RUN ──stop, failure, deadline──> SETTLE ──handle terminal──> ENDED
                                       └──settle time-out──> ZOMBIE ──handle terminal──> ENDED

One piece is in flight per lease and at most eight per source; leases take turns. Handles are polled until they are
terminal and released only then. A zombie's destination records are reported stranded and stay so until its handle is
terminal or the process dies (the fence). Records are verified after arrival while later pieces move.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from sluice_engine.pool import Pools
from sluice_engine.step import PullItem
from sluice_engine.transfer.books import check_books
from sluice_engine.transfer.contract import DONE, PENDING, Failure, Outcome, Transfer
from sluice_engine.transfer.errors import PeerLost, PlanRejected
from sluice_engine.transfer.messages import PullEvent, PullFailed, PullsTerminal, RecordsDone, StrandedEnded
from sluice_engine.transfer.pings import Pings
from sluice_engine.transfer.plan import Piece, PoolShape, Shapes, plan_pieces
from sluice_engine.transfer.pull import DEFAULTS, Flight, Pull, PullerSettings, PullState, RecordAt
from sluice_engine.transfer.sources import Sources
from sluice_engine.transfer.stranded import Stranded
from sluice_engine.transfer.verify import Verdict, Verifier
from sluice_protocol.source import RecordName, SourceHello

# Nothing to do: how long until the next look.
IDLE_S = 0.25


class Puller:
    def __init__(
        self, transfer: Transfer, pools: Pools, verifier: Verifier, settings: PullerSettings = DEFAULTS
    ) -> None:
        """`pools`: the destinations, borrowed; `verifier` looks at the same."""
        self._transfer, self._verifier, self._settings = transfer, verifier, settings
        self._shapes: Shapes = {kind: PoolShape.of(pool) for kind, pool in pools.items()}
        self._sources = Sources(settings.max_in_flight_per_peer)
        self._pulls: dict[str, Pull] = {}
        self._by_serial: dict[int, Pull] = {}
        # Pulls whose lease is forgotten or over, but whose handle is not terminal.
        self._ghosts: list[Pull] = []
        self._ended: set[str] = set()
        self._turns: deque[int] = deque()
        self._to_verify: list[tuple[int, Sequence[PullItem]]] = []
        self._stranded = Stranded(self._shapes, settings.stranded_cap, settings.fence_after_s)
        self._filling: dict[RecordAt, int] = {}
        self._events: list[PullEvent] = []
        self._serial = 0
        # When something moved last, and whether anything was done in the last tick.
        self._moved = 0.0
        self._busy = False
        self.counters: Counter[str] = Counter()
        self._pings = Pings(transfer)
        # Test hook: how many pieces may still be posted; None: no limit.
        self.allowance: int | None = None

    # -- commands --------------------------------------------------------------------------------------------------

    def attach(self, peer: SourceHello) -> None:
        """Raises BadPeer, PeerLost."""
        self._transfer.attach(peer)
        self._sources.attach(peer)
        self.counters["attached"] += 1

    def detach(self, peer: str, now: float) -> None:
        """Its leases fail; what is in flight is still polled to the end."""
        for pull in self._of_peer(peer):
            self._fail(pull, Failure("PeerLost", f"{peer!r} was detached"), now)
        self._transfer.detach(peer)
        self._sources.detach(peer)

    def add(self, lease_id: str, peer: str, items: Sequence[PullItem], now: float) -> None:
        """Pull these records too. After the lease's end (and until it is forgotten) this does nothing."""
        pull = self._pulls.get(lease_id)
        if lease_id in self._ended or (pull is not None and pull.state is not PullState.RUN):
            self.counters["late_adds"] += 1
            return
        if pull is None:
            self._serial += 1
            pull = self._pulls[lease_id] = self._by_serial[self._serial] = Pull(lease_id, peer, self._serial, now)
            self._turns.append(self._serial)
            self.counters["leases"] += 1
        try:
            pieces = self._plan(pull, items)
        except PlanRejected as error:
            self._fail(pull, Failure(error.reason, error.detail), now)
            return
        except PeerLost as error:
            self._fail(pull, Failure(error.reason, str(error)), now)
            return
        for item in items:
            self._filling[item.kind, item.destination] = pull.serial
        pull.take(items, pieces)
        self._sources.owe(peer, sum(piece.nbytes for piece in pieces))
        owed = self._sources.get(peer).owed_bytes
        allowed = self._settings.deadline_base_s + owed / self._settings.floor_bytes_per_s
        pull.deadline = max(pull.deadline, now + allowed)

    def ping(self, peer: str, now: float) -> None:
        """Try the lane to this source; `Pinged` follows."""
        self._pings.start(peer, now)

    def stop(self, lease_id: str, now: float) -> None:
        """PullsTerminal follows, once a lease, whether or not anything was ever pulled."""
        pull = self._pulls.get(lease_id)
        if pull is not None:
            self._settle(pull, now)
        elif lease_id not in self._ended:
            self._ended.add(lease_id)
            self._events.append(PullsTerminal(lease_id, ()))

    def forget(self, lease_id: str, now: float) -> None:
        pull = self._pulls.get(lease_id)
        if pull is not None and pull.flight is not None:
            self.counters["forgotten_in_flight"] += 1
            self._settle(pull, now)
            pull.forgotten = True
        elif pull is not None:
            self._drop(pull)
        self._ended.discard(lease_id)

    def tick(self, now: float, *, helping: bool = False) -> list[PullEvent]:
        """One turn: at most one post, no waiting. Returns what happened since the last turn. `helping`: the caller's
        thread has nothing else to do; where nothing moves, it checks what has come by itself, as `help_verify` does."""
        self._busy = False
        self._take_verdicts(now)
        for pull in [*self._pulls.values(), *self._ghosts]:
            if pull.flight is not None:
                self._poll(pull, now)
            elif pull.state is PullState.RUN and pull.queue and now >= pull.deadline:
                self._fail(pull, Failure("Deadline", self._lateness(pull, now)), now)
        self._post_one(now)
        for serial, items in self._to_verify:
            self._verifier.submit(serial, items)
        self._to_verify.clear()
        if not helping or self._is_in_flight:
            self._verifier.rouse()
        elif self.help_verify():
            self._take_verdicts(now)
        self._events += self._stranded.due(now)
        self._events += self._pings.tick(now)
        events, self._events = self._events, []
        return events

    def idle_for(self, now: float) -> float:
        """Seconds that the caller may wait before the next tick, unless a command comes. 0: more can be done now."""
        if self._events or self._next_to_post() is not None:
            return 0.0
        if self._is_in_flight:
            # Soon after something moved something will again; a source that is silent is asked less often.
            return 0.0 if self._busy else min(max((now - self._moved) / 4, 50e-6), 2e-3)
        if any(pull.outstanding for pull in self._pulls.values() if pull.state is PullState.RUN):
            return 0.0 if self._busy else 50e-6 if self.allowance is None else 5e-3
        idle = self._settings.zombie_poll_s if self._ghosts else IDLE_S
        pinging = self._pings.idle_for()
        return idle if pinging is None else min(idle, pinging)

    def help_verify(self) -> bool:
        """Check some records here, for at most as long as a piece is digested, if there is nothing to move meanwhile.

        For a caller whose thread has nothing else to do. Their verdicts come with the next tick."""
        return not self._is_in_flight and self._next_to_post() is None and self._verifier.help()

    # -- questions -------------------------------------------------------------------------------------------------

    @property
    def pulls(self) -> list[Pull]:
        """To look at."""
        return [*self._pulls.values(), *self._ghosts]

    @property
    def num_leases(self) -> int:
        return len(self._pulls)

    @property
    def num_in_flight(self) -> int:
        return sum(pull.flight is not None for pull in [*self._pulls.values(), *self._ghosts])

    @property
    def stranded(self) -> frozenset[RecordAt]:
        return self._stranded.records

    def check_integrity(self) -> None:
        """Raises AssertionError when the books do not add up."""
        check_books([*self._pulls.values(), *self._ghosts], self._sources, self._stranded, self.counters)

    # -- inside ----------------------------------------------------------------------------------------------------

    @property
    def _is_in_flight(self) -> bool:
        """Something of a lease that is on the books; a zombie is on none."""
        return any(pull.flight is not None for pull in self._pulls.values())

    def _plan(self, pull: Pull, items: Sequence[PullItem]) -> tuple[Piece, ...]:
        if self._stranded.is_refused(pull.peer):
            raise PlanRejected("PeerRefused", f"too many records are stranded on {pull.peer!r}")
        source = self._sources.get(pull.peer)
        for item in items:
            owner = self._filling.get((item.kind, item.destination))
            if owner is not None:
                detail = f"{item.kind.value} record {item.destination} is being filled already"
                raise PlanRejected("DuplicateDestination", detail)
        return plan_pieces(
            pull.lease_id,
            pull.peer,
            items,
            source.shapes,
            self._shapes,
            piece_bytes=self._settings.piece_bytes,
            split_records=self._transfer.splits_records,
        )

    def _take_verdicts(self, now: float) -> None:
        for verdict in self._verifier.collect():
            lot = verdict.lot
            self._moved, self._busy = now, True
            self.counters["records_verified"] += len(lot.items)
            self.counters["records_digested"] += len(lot.due)
            for _, failure in verdict.failures:
                self.counters[f"mismatch_{failure.reason}"] += 1
            pull = self._by_serial.get(lot.serial)
            if pull is not None and pull.state is PullState.RUN:
                self._judge(pull, verdict, now)

    def _judge(self, pull: Pull, verdict: Verdict, now: float) -> None:
        if verdict.failures:
            _, failure = verdict.failures[0]
            items = [item for item, _ in verdict.failures]
            names = [RecordName(item.kind.value, item.source, item.source_generation) for item in items]
            self._fail(pull, failure, now, tuple(names))
            return
        pull.outstanding -= len(verdict.lot.items)
        pull.done_records += len(verdict.lot.items)
        pull.done_bytes += verdict.lot.nbytes
        if not pull.outstanding:
            self._events.append(RecordsDone(pull.lease_id, pull.done_records, pull.done_bytes))

    def _poll(self, pull: Pull, now: float) -> None:
        assert pull.flight is not None
        if pull.state is PullState.ZOMBIE:
            if now < pull.poll_at:
                return
            pull.poll_at = now + self._settings.zombie_poll_s
        outcome = self._transfer.poll(pull.flight.handle)
        if outcome is not PENDING:
            self._land(pull, outcome, now)
        elif pull.state is PullState.RUN and now >= pull.deadline:
            self._fail(pull, Failure("Deadline", self._lateness(pull, now)), now)
        elif pull.state is PullState.SETTLE and now >= pull.settle_by:
            self._strand(pull, now)

    def _land(self, pull: Pull, outcome: Outcome, now: float) -> None:
        """The handle is terminal: only now it is released."""
        assert pull.flight is not None
        flight = pull.flight
        piece = flight.piece
        self._transfer.release(flight.handle)
        pull.flight, self._moved, self._busy = None, now, True
        self._sources.land(piece)
        self.counters["pieces_done" if outcome is DONE else "pieces_failed"] += 1
        self.counters["bytes"] += piece.nbytes if outcome is DONE else 0
        if pull.state is PullState.ZOMBIE:
            self._stranded.end(flight.records)
            self._events.append(StrandedEnded(pull.lease_id, flight.records))
            self._drop(pull)
        elif pull.state is PullState.SETTLE:
            self._end(pull, ())
        elif isinstance(outcome, Failure):
            self._fail(pull, outcome, now)
        elif piece.completes:
            self._to_verify.append((pull.serial, piece.completes))

    def _post_one(self, now: float) -> None:
        pull = self._next_to_post()
        if pull is None:
            return
        self._turns.rotate(-1 - self._turns.index(pull.serial))
        piece = pull.queue[0]
        try:
            handle = self._transfer.post(piece)
        except PeerLost as error:
            self._fail(pull, Failure(error.reason, str(error)), now)
            return
        pull.queue.popleft()
        pull.flight, self._moved, self._busy = Flight(handle, piece), now, True
        self._sources.post(piece)
        self.counters["pieces_posted"] += 1
        if self.allowance is not None:
            self.allowance -= 1
        # Some lanes have copied everything by now.
        self._poll(pull, now)

    def _next_to_post(self) -> Pull | None:
        if self.allowance == 0:
            return None
        for serial in self._turns:
            pull = self._by_serial[serial]
            if pull.can_post and self._sources.has_room(pull.peer):
                return pull
        return None

    def _fail(self, pull: Pull, failure: Failure, now: float, mismatched: tuple[RecordName, ...] = ()) -> None:
        if pull.state is not PullState.RUN:
            return
        self.counters["failed"] += 1
        self.counters[f"failed_{failure.reason}"] += 1
        self._events.append(PullFailed(pull.lease_id, failure.reason, failure.detail, mismatched))
        self._settle(pull, now)

    def _settle(self, pull: Pull, now: float) -> None:
        if pull.state is not PullState.RUN:
            return
        pull.state, pull.settle_by = PullState.SETTLE, now + self._settings.settle_s
        self._sources.owe(pull.peer, -sum(piece.nbytes for piece in pull.queue))
        pull.queue.clear()
        if pull.flight is None:
            self._end(pull, ())

    def _strand(self, pull: Pull, now: float) -> None:
        pull.state, pull.poll_at = PullState.ZOMBIE, now + self._settings.zombie_poll_s
        records = pull.in_flight_records
        self.counters["zombies"] += 1
        self.counters["stranded"] += len(records)
        self._ghosts.append(pull)
        self._end(pull, records)
        zombies = sum(ghost.peer == pull.peer for ghost in self._ghosts)
        full = zombies >= self._settings.max_in_flight_per_peer
        refused = self._stranded.add(pull.peer, records, now, slots_full=full)
        if refused is not None:
            self._events.append(refused)
            for other in self._of_peer(pull.peer):
                self._fail(other, Failure("PeerRefused", f"too many records are stranded on {pull.peer!r}"), now)

    def _end(self, pull: Pull, stranded: tuple[RecordAt, ...]) -> None:
        """The lease's last event. A late add is ignored from here on, until the lease is forgotten."""
        self._events.append(PullsTerminal(pull.lease_id, stranded))
        if not pull.forgotten:
            self._ended.add(pull.lease_id)
        self._drop(pull)

    def _drop(self, pull: Pull) -> None:
        """Off the books, except for what a zombie may still write."""
        if self._pulls.get(pull.lease_id) is pull:
            del self._pulls[pull.lease_id]
            del self._by_serial[pull.serial]
            self._turns.remove(pull.serial)
        if pull.state is not PullState.ZOMBIE:
            pull.state = PullState.ENDED
        elif pull.flight is None:
            self._ghosts.remove(pull)
        kept = set(pull.in_flight_records)
        for item in pull.items:
            at = item.kind, item.destination
            if at not in kept and self._filling.get(at) == pull.serial:
                del self._filling[at]

    def _of_peer(self, peer: str) -> list[Pull]:
        return [pull for pull in self._pulls.values() if pull.peer == peer]

    def _lateness(self, pull: Pull, now: float) -> str:
        return f"{pull.owed_bytes} bytes from {pull.peer!r} were left at its deadline, {now - pull.deadline:.3f} s ago"
