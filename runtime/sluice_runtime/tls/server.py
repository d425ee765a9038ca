"""gRPC servers with our certificate, and the check of callers. Plain ports where there is no identity."""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio

from sluice_runtime import log
from sluice_runtime.tls.identity import Identity
from sluice_runtime.tls.keeper import IdentityKeeper
from sluice_runtime.tls.peers import objection

NAMES = "x509_subject_alternative_name"
# A caller that repeats calls that it may not make is logged once in so long; the counter counts all.
SAY_S = 60.0


def bind(server: grpc.aio.Server, address: str, keeper: IdentityKeeper | None) -> int:
    """The port, for `host:port`; 0: picked by the system. Raises RuntimeError when it is taken."""
    if keeper is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, server_credentials(keeper))


def interceptors(keeper: IdentityKeeper | None) -> list[grpc.aio.ServerInterceptor]:  # type: ignore[type-arg]
    """What a server of ours has to be built with where `bind` gets a keeper."""
    return [] if keeper is None else [CallerInterceptor(keeper)]


def server_credentials(keeper: IdentityKeeper) -> grpc.ServerCredentials:
    """For one server: asks the keeper at every new connection. A caller without a certificate of ours gets none."""
    given = keeper.current

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """On a thread of gRPC's. None: as before."""
        nonlocal given
        current = keeper.current
        if current is given:
            return None
        given = current
        return _configuration(current)

    first = _configuration(given)
    return grpc.dynamic_ssl_server_credentials(first, fetch, require_client_authentication=True)  # type: ignore[arg-type]


def _configuration(identity: Identity) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(identity.key, identity.certificate)], identity.authorities)


class CallerInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Answers PERMISSION_DENIED to a caller whose certificate has no name that may make the call."""

    def __init__(self, keeper: IdentityKeeper) -> None:
        self._keeper = keeper
        self._said: dict[str, float] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        return None if handler is None else _guarded(handler, self._guard(handler_call_details.method))  # type: ignore[attr-defined]

    def _guard(self, method: str) -> Callable[[Any], Awaitable[None]]:
        async def check(context: Any) -> None:
            names = [name.decode(errors="replace") for name in context.auth_context().get(NAMES, ())]
            if why := objection(method, names, self._keeper.current.name.domain):
                self._count(why, context.peer())
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, why)

        return check

    def _count(self, why: str, peer: str) -> None:
        self._keeper.counters["refused_callers"] += 1
        now = time.monotonic()
        if now - self._said.get(why, float("-inf")) >= SAY_S:
            self._said[why] = now
            log.warning("caller refused", why=why, peer=peer)


def _guarded(handler: Any, check: Callable[[Any], Awaitable[None]]) -> Any:
    """The same handler, which begins with `check(context)`."""
    kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
    inner = getattr(handler, kind)

    async def answer(request: Any, context: Any) -> Any:
        await check(context)
        return await inner(request, context)

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        await check(context)
        async with aclosing(inner(request, context)) as messages:
            async for message in messages:
                yield message

    # Handlers that write to their context are coroutines also where they stream.
    outer = stream if inspect.isasyncgenfunction(inner) else answer
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(outer, handler.request_deserializer, handler.response_serializer)
