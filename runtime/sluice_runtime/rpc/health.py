"""`grpc.health.v1` with a bound: its watchers need no key, and each holds a stream for as long as it likes."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer

MAX_WATCHERS = 64


class BoundedHealth(HealthServicer):  # type: ignore[misc]  # it has no types
    def __init__(self) -> None:
        super().__init__()
        self._watching = 0

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        """RESOURCE_EXHAUSTED for a client that comes when MAX_WATCHERS are there: `Check` is for everybody."""
        if self._watching >= MAX_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WATCHERS} watch already: use Check")
        self._watching += 1
        try:
            await super().Watch(request, context)
        finally:
            self._watching -= 1
