"""What a rollout leaves to serve at each moment, by pods as the API server has them: looked at all the time."""

from __future__ import annotations

import threading
from collections import Counter
from fractions import Fraction
from typing import Self

from cluster_deployment import Served

from sluice_operator.decide.groups import Group, capacity
from sluice_operator.decide.reading import read_pod
from sluice_operator.live.cluster import KINDS
from sluice_operator.names import ENGINE_ROLES, LABEL_DEPLOYMENT, PodRole

LOOK_S = 0.05


class CapacityWatch:
    """`with CapacityWatch(served, prefill=2, decode=2) as watch:` - `least` and `most_pods` of all looks so far."""

    def __init__(self, served: Served, prefill: int, decode: int) -> None:
        self.least = Fraction(1000)
        self.most_pods: Counter[PodRole] = Counter()
        self.looks = 0
        self.failure: BaseException | None = None
        self._served = served
        self._wanted = {PodRole.PREFILL: prefill, PodRole.DECODE: decode}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="capacity-watch")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join(30)
        assert not self._thread.is_alive()
        if exc[0] is None and self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            while not self._end.wait(LOOK_S):
                self._look()
        except BaseException as error:
            self.failure = error

    def _look(self) -> None:
        query = f"?labelSelector={LABEL_DEPLOYMENT}={self._served.name}"
        items = self._served.client.items(KINDS["Pod"].path(self._served.namespace) + query)
        pods = [p for p in map(read_pod, items) if p is not None and p.role in ENGINE_ROLES and p.is_member]
        useful = Counter((p.role, p.revision) for p in pods if p.ready and p.serving)
        groups = [Group(role, revision, revision, n, n) for (role, revision), n in useful.items()]
        self.least = min(self.least, capacity(groups, self._wanted))
        for role, number in Counter(p.role for p in pods).items():
            self.most_pods[role] = max(self.most_pods[role], number)
        self.looks += 1
