"""What all our gRPC servers have in common, be they an engine's or a gateway's: no client is served without the key."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from sluice_runtime.rpc.options import KEY_HEADER, OPTIONS, SERVER
from sluice_runtime.tls.keeper import IdentityKeeper
from sluice_runtime.tls.server import interceptors

# Probes have no key, and learn a word.
OPEN_TO_ALL = "/grpc.health.v1.Health/"


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses callers without the run's key; compares in constant time."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        if handler_call_details.method.startswith(OPEN_TO_ALL):  # type: ignore[attr-defined]
            return await continuation(handler_call_details)
        told = dict(handler_call_details.invocation_metadata or ()).get(KEY_HEADER, "")
        if hmac.compare_digest(told.encode() if isinstance(told, str) else bytes(told), self._key):
            return await continuation(handler_call_details)
        return grpc.stream_stream_rpc_method_handler(_refuse_key)


async def _refuse_key(request_iterator: object, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{KEY_HEADER} is missing or wrong")


def build_server(key: str, identity: IdentityKeeper | None = None) -> grpc.aio.Server:
    """Its port comes from `tls.server.bind`, with the same identity."""
    return grpc.aio.server(interceptors=[KeyInterceptor(key), *interceptors(identity)], options=(*OPTIONS, *SERVER))
