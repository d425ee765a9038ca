"""A puller over the in-memory transport, with a clock that stands still unless it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from transfer_double import PLAN, fill, hello, item, new_pools, tiny_layouts

from sluice_engine.step import PullItem
from sluice_engine.transfer.memory import Fault, MemoryFabric, MemoryTransfer
from sluice_engine.transfer.messages import PullEvent
from sluice_engine.transfer.plan import Piece
from sluice_engine.transfer.pull import PullerSettings
from sluice_engine.transfer.puller import Puller
from sluice_engine.transfer.verify import SliceVerifier, VerifyPolicy
from sluice_records import PoolPlan, RecordKind

E = TypeVar("E", bound=PullEvent)


class PullerRig:
    """`one_record`: a piece per record."""

    def __init__(
        self,
        *,
        plan: PoolPlan = PLAN,
        one_record: bool = True,
        policy: VerifyPolicy | None = None,
        settings: PullerSettings | None = None,
    ) -> None:
        layouts, self.fabric = tiny_layouts(perturbed=True), MemoryFabric()
        self.source, self.reader = new_pools(layouts, plan), new_pools(layouts, plan)
        fill(self.source)
        self.transfer = MemoryTransfer(self.fabric, self.reader)
        told = settings or PullerSettings(piece_bytes=layouts.page.record_bytes if one_record else 1 << 22)
        self.puller = Puller(self.transfer, self.reader, SliceVerifier(self.reader, policy or VerifyPolicy()), told)
        self.now = 0.0
        self.events: list[PullEvent] = []
        self.attach("source.1")

    def attach(self, incarnation: str) -> None:
        self.fabric.serve(incarnation, self.source)
        self.puller.attach(hello(self.source, incarnation))

    def item(self, source: int, destination: int, kind: RecordKind = RecordKind.PAGE) -> PullItem:
        return item(self.source, kind, source, destination)

    def add(self, lease_id: str, *pairs: tuple[int, int], peer: str = "source.1") -> None:
        self.puller.add(lease_id, peer, [self.item(*pair) for pair in pairs], self.now)

    def fault(self, fault: Fault | Callable[[Piece], Fault]) -> None:
        self.transfer.fault = fault if callable(fault) else lambda piece: fault

    def tick(self, times: int = 1, seconds: float = 0.0) -> None:
        for _ in range(times):
            self.now += seconds
            self.events += self.puller.tick(self.now)
            self.puller.check_integrity()

    def run(self) -> None:
        """Until nothing moves while time stands still."""
        for _ in range(1000):
            before = dict(self.puller.counters), len(self.events)
            self.tick(3)
            if before == (dict(self.puller.counters), len(self.events)):
                return
        raise AssertionError("still busy")

    def of(self, kind: type[E], lease_id: str = "") -> list[E]:
        return [
            event
            for event in self.events
            if isinstance(event, kind) and lease_id in ("", getattr(event, "lease_id", ""))
        ]
