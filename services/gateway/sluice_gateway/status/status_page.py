"""The routes of the status page: one HTML file, the view behind it once, and the same again and again."""

from __future__ import annotations

from importlib.resources import files

import orjson
from starlette.requests import Request
from starlette.responses import Response

from sluice_gateway.http.auth import check_key
from sluice_gateway.http.watcher import EventResponse
from sluice_gateway.routing.board import StatusBoard
from sluice_gateway.status.counters import Counters

# The page is one file: its own script and style, and no others.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class StatusPage:
    """Every route raises ApiError (401) where API keys are configured and none is given, in the header Authorization
    or, since a browser's address bar has no headers, as `?key=`."""

    def __init__(self, board: StatusBoard, api_keys: tuple[str, ...], counters: Counters) -> None:
        self._counters = counters
        self._board = board
        self._api_keys = api_keys
        self._html = (files("sluice_gateway.status") / "status.html").read_bytes()

    def _check(self, request: Request) -> None:
        key = request.query_params.get("key")
        check_key(request.headers.get("authorization") or (f"Bearer {key}" if key else None), self._api_keys)

    async def page(self, request: Request) -> Response:
        self._check(request)
        headers = HEADERS | {"content-security-policy": POLICY, "referrer-policy": "no-referrer"}
        return Response(self._html, media_type="text/html; charset=utf-8", headers=headers)

    async def now(self, request: Request) -> Response:
        self._check(request)
        return Response(orjson.dumps(await self._board.now()), media_type="application/json", headers=HEADERS)

    async def events(self, request: Request) -> Response:
        self._check(request)
        headers = HEADERS | {"x-accel-buffering": "no"}
        return EventResponse(self._board.follow(), headers, self._counters)
