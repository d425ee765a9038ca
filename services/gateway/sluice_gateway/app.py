"""The HTTP application. Routes only: what a request means is decided elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from random import Random
from time import monotonic, time
from typing import Any
from uuid import uuid4

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from sluice_gateway.gateway import Gateway
from sluice_gateway.http.respond import ClientGone
from sluice_gateway.openai.endpoints import Endpoints
from sluice_gateway.openai.errors import ApiError, internal
from sluice_gateway.routing.dispatch import Clock
from sluice_gateway.routing.engine import ClientFactory
from sluice_gateway.routing.route import BlockKeys, no_keys
from sluice_gateway.settings import Settings
from sluice_gateway.status.status_page import StatusPage
from sluice_gateway.text.tokenizer import Tokenizer
from sluice_runtime.health.recorder import Recorder
from sluice_runtime.tls.keeper import IdentityKeeper
from sluice_runtime.tracing import NO_TRACER, Tracer

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def create_app(
    settings: Settings,
    tokenizer: Tokenizer,
    clients: ClientFactory,
    *,
    clock: Clock = monotonic,
    wall: Clock = time,
    random: Random | None = None,
    new_id: Callable[[], str] = lambda: uuid4().hex,
    block_keys: BlockKeys = no_keys,
    tracer: Tracer = NO_TRACER,
    recorder: Recorder | None = None,
    identity: IdentityKeeper | None = None,
    beside: Callable[[Gateway], AbstractAsyncContextManager[object]] = lambda gateway: nullcontext(),
) -> FastAPI:
    """`app.state.gateway` is the Gateway. The links live from the application's start-up to its shutdown, and `beside`
    while they do."""
    gateway = Gateway(settings, tokenizer, clients, clock, random or Random(), block_keys, tracer, recorder, identity)
    endpoints = Endpoints(gateway, wall, new_id)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await gateway.start()
        try:
            async with beside(gateway):
                yield
        finally:
            await gateway.close()

    app = FastAPI(lifespan=lifespan, openapi_url=None, title="Sluice gateway", redirect_slashes=False)
    app.state.gateway = gateway
    _add_routes(app, endpoints, StatusPage(gateway.board, settings.api_keys, gateway.counters))
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(ClientGone, _nobody)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unforeseen)
    return app


def _add_routes(app: FastAPI, endpoints: Endpoints, status: StatusPage) -> None:
    table: list[tuple[str, str, Handler]] = [
        ("POST", "/v1/chat/completions", endpoints.chat),
        ("POST", "/v1/completions", endpoints.completions),
        ("GET", "/v1/models", endpoints.models),
        ("GET", "/v1/models/{model_id:path}", endpoints.model),
        ("GET", "/livez", endpoints.livez),
        ("GET", "/readyz", endpoints.readyz),
        ("GET", "/health", endpoints.health),
        ("GET", "/version", endpoints.version),
        ("GET", "/status", status.page),
        ("GET", "/status/now", status.now),
        ("GET", "/status/events", status.events),
    ]
    for method, path, handler in table:
        app.add_route(path, handler, methods=[method], include_in_schema=False)


def _answer(error: ApiError, headers: dict[str, str] | None = None) -> Response:
    given = {name.decode(): value.decode() for name, value in error.headers()}
    if error.status in (408, 413, 415):
        given["connection"] = "close"  # the body may not have been read
    return Response(error.body(), error.status, given | (headers or {}))


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    counters = request.app.state.gateway.counters
    counters.refused += error.status < 500
    counters.failed += error.status >= 500
    return _answer(error)


async def _nobody(_request: Request, _error: Exception) -> Response:
    return Response(status_code=400)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {
        404: f"Unknown request URL: {request.method} {request.url.path}.",
        405: f"Not allowed to {request.method} on {request.url.path}.",
    }
    codes = {404: "unknown_url", 405: "method_not_allowed"}
    message = messages.get(error.status_code, error.detail)
    allow = {name: value for name, value in (error.headers or {}).items() if name.lower() == "allow"}
    return _answer(ApiError(error.status_code, message, code=codes.get(error.status_code)), allow)


async def _unforeseen(_request: Request, _error: Exception) -> Response:
    return _answer(internal())
