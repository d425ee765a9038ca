"""EndpointSlices over HTTP: get, list and watch in one namespace, which is all that a gateway's account may do."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, Self

import aiohttp

from sluice_gateway.routing.discover import ApiFailed, Expired, Target, failure_of
from sluice_runtime.cluster_connection import Connection

LIST_S, PAGE_ITEMS = 15.0, 500
# The API server ends a watch after so long; one without a sign of life for a little longer is dead.
WATCH_S, WATCH_SLACK_S = 60.0, 15.0
MAX_ANSWER_BYTES = 32 << 20
MAX_SAID = 300


class HttpSliceApi:
    """Use as a context manager. The token is read anew for each request: a pod's is replaced while it runs."""

    def __init__(
        self, connection: Connection, target: Target, list_s: float = LIST_S, watch_s: float = WATCH_S
    ) -> None:
        self._connection, self._target = connection, target
        self._list_s, self._watch_s = list_s, watch_s
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{target.namespace}/endpointslices"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(ssl=self._connection.tls(), limit=4)
        self._session = aiohttp.ClientSession(base_url=self._connection.server, connector=connector)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def listed(self) -> tuple[list[Any], str]:
        found: list[Any] = []
        token = ""
        while True:
            told = await self._page(token)
            try:
                found += told["items"]
                token, version = told["metadata"].get("continue", ""), told["metadata"]["resourceVersion"]
            except (KeyError, TypeError, AttributeError) as error:
                raise ApiFailed(f"a listing without {error}") from error
            if not token:
                return found, str(version)

    async def _page(self, token: str) -> Any:
        query = {"limit": str(PAGE_ITEMS)} | ({"continue": token} if token else {})
        timeout = aiohttp.ClientTimeout(total=self._list_s)
        body = b""
        async for part in self._read(query, timeout):
            body += part
            if len(body) > MAX_ANSWER_BYTES:
                raise ApiFailed(f"a listing of more than {MAX_ANSWER_BYTES} bytes")
        return _parsed(body)

    async def watched(self, version: str) -> AsyncIterator[Mapping[str, Any]]:
        query = {
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, int(self._watch_s))),
        }
        silent_s = self._watch_s + WATCH_SLACK_S
        rest = b""
        async for part in self._read(query, aiohttp.ClientTimeout(total=2 * silent_s, sock_read=silent_s)):
            *lines, rest = (rest + part).split(b"\n")
            if len(rest) > MAX_ANSWER_BYTES:
                raise ApiFailed(f"an event of more than {MAX_ANSWER_BYTES} bytes")
            for line in filter(None, lines):
                event = _parsed(line)
                if not isinstance(event, Mapping):
                    raise ApiFailed(f"not an event: {str(event)[:MAX_SAID]}")
                yield event

    async def _read(self, query: Mapping[str, str], timeout: aiohttp.ClientTimeout) -> AsyncIterator[bytes]:
        assert self._session is not None, "entered"
        params = {"labelSelector": self._target.selector, **query}
        try:
            headers = {"Accept": "application/json"}
            if token := self._connection.bearer():
                headers["Authorization"] = f"Bearer {token}"
            async with self._session.get(self._path, params=params, headers=headers, timeout=timeout) as answer:
                if answer.status != 200:
                    raise _refused(answer.status, await answer.content.read(1 << 16), self._target)
                try:
                    async for part in answer.content.iter_any():
                        yield part
                except BaseException:
                    _cut(answer)
                    raise
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiFailed(f"{self._connection.server}: {error!r}") from error


def _cut(answer: aiohttp.ClientResponse) -> None:
    """Its connection, at once: the session forgets one that is only closed, which then waits half a minute for the
    other end's goodbye."""
    if answer.connection is not None and answer.connection.transport is not None:
        answer.connection.transport.abort()


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError as error:
        raise ApiFailed(f"not JSON: {body[:MAX_SAID]!r}") from error


def _refused(status: int, body: bytes, target: Target) -> ApiFailed:
    try:
        failure = failure_of(json.loads(body))
    except ValueError:
        failure = ApiFailed(body[:MAX_SAID].decode(errors="replace"))
    if status == 410:
        return Expired(str(failure))
    if status in (401, 403):
        rights = f"let this service account get, list and watch endpointslices in namespace {target.namespace}"
        return ApiFailed(f"{status}: {failure}: {rights}")
    return ApiFailed(f"{status}: {failure}")
