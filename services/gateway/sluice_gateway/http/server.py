"""`sluice.v1.Fleet`: the gateway's own gRPC server, for the operator."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from sluice_protocol.codec import encode_fleet_report
from sluice_protocol.fleet import FleetReport
from sluice_protocol.generate import SCHEMA_VERSION
from sluice_protocol.v1 import fleet_pb2, fleet_pb2_grpc
from sluice_runtime.address import join, split
from sluice_runtime.rpc.keyed_server import build_server
from sluice_runtime.tls.keeper import IdentityKeeper
from sluice_runtime.tls.server import bind


class FleetService(fleet_pb2_grpc.FleetServicer):
    def __init__(self, report: Callable[[], FleetReport]) -> None:
        self._report = report

    async def Report(self, request: fleet_pb2.ReportRequest, context: Any) -> fleet_pb2.ReportReply:
        if request.schema_version != SCHEMA_VERSION:
            detail = f"schema_version is {request.schema_version}, this gateway speaks {SCHEMA_VERSION}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, detail)
        return encode_fleet_report(self._report())


@asynccontextmanager
async def serving_reports(
    report: Callable[[], FleetReport], listen: str, key: str, identity: IdentityKeeper | None = None
) -> AsyncIterator[str]:
    """Its address, host:port, while it serves. `listen`: host:port; port 0: the system chooses. Raises RuntimeError
    when the port is taken."""
    host, wanted = split(listen)
    server = build_server(key, identity)
    fleet_pb2_grpc.add_FleetServicer_to_server(FleetService(report), server)
    try:
        port = bind(server, join(host, int(wanted)), identity)
    except RuntimeError as error:
        raise OSError(f"--report-listen {listen}: nothing can be bound there: {error}") from error
    await server.start()
    try:
        yield join(host, port)
    finally:
        await server.stop(None)
