"""The API server, a call at a time: JSON in and out, every call bounded in time, writes by the leader only.

Small on purpose: the official client alone weighs more than the rest of the operator.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import aiohttp

from sluice_operator.live.connection import Connection
from sluice_operator.names import FIELD_MANAGER

Object = dict[str, Any]
# What one operator may have in flight; the API server queues the rest of everybody's anyway.
MAX_IN_FLIGHT = 32
PAGE_ITEMS = 500
_ESCAPED_BY_GO = {ord(char): f"\\u{ord(char):04x}" for char in "&<>\u2028\u2029"}
# The API server quotes whole objects.
MAX_SAID = 400
MERGE, STRATEGIC, JSON_PATCH, APPLY = (
    "application/merge-patch+json",
    "application/strategic-merge-patch+json",
    "application/json-patch+json",
    "application/apply-patch+yaml",
)


class ClusterError(Exception):
    """Of the API server or the way to it. Worth another attempt, unless a subclass says otherwise."""


class Unreachable(ClusterError):
    """No answer, or none in time: whether a write was carried out is not known."""


class Refused(ClusterError):
    """`code`: an HTTP status. `message`: the API server's own words."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(f"{code} {reason}: {message[:MAX_SAID]}")
        self.code, self.reason, self.message = code, reason, message


class NotFound(Refused):
    """404: the object, or its kind, is not there."""


class Conflict(Refused):
    """409: it exists, or is another one than was seen."""


class Forbidden(Refused):
    """403: not by our roles."""


class Invalid(Refused):
    """400 or 422: no attempt will succeed; the message names the path."""


class Failed(Refused):
    """500: the API server, or more often a webhook that it asks, fails over this very request."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Where objects of a kind are found."""

    api_version: str
    plural: str

    @property
    def resource(self) -> Mapping[str, str]:
        """As reviews of access name it."""
        group, _, version = self.api_version.rpartition("/")
        return {"group": group, "version": version, "resource": self.plural}

    def path(self, namespace: str, name: str = "") -> str:
        root = "/api" if "/" not in self.api_version else "/apis"
        inside = f"/namespaces/{namespace}" if namespace else ""
        return f"{root}/{self.api_version}{inside}/{self.plural}" + (f"/{name}" if name else "")


KINDS = {
    "ModelDeployment": Kind("sluice.dev/v1alpha1", "modeldeployments"),
    "Deployment": Kind("apps/v1", "deployments"),
    "ReplicaSet": Kind("apps/v1", "replicasets"),
    "ControllerRevision": Kind("apps/v1", "controllerrevisions"),
    "Pod": Kind("v1", "pods"),
    "Service": Kind("v1", "services"),
    "ServiceAccount": Kind("v1", "serviceaccounts"),
    "ConfigMap": Kind("v1", "configmaps"),
    "Secret": Kind("v1", "secrets"),
    "Event": Kind("v1", "events"),
    "Node": Kind("v1", "nodes"),
    "PodDisruptionBudget": Kind("policy/v1", "poddisruptionbudgets"),
    "NetworkPolicy": Kind("networking.k8s.io/v1", "networkpolicies"),
    "Role": Kind("rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": Kind("rbac.authorization.k8s.io/v1", "rolebindings"),
    "ResourceClaimTemplate": Kind("resource.k8s.io/v1", "resourceclaimtemplates"),
    "PodMonitor": Kind("monitoring.coreos.com/v1", "podmonitors"),
    "Lease": Kind("coordination.k8s.io/v1", "leases"),
}


class Cluster:
    """`timeout_s`: of every call, body included. `before_write`: called as late as can be before a request that is no
    GET is written to its connection; may raise, or end the process."""

    def __init__(self, connection: Connection, timeout_s: float, before_write: Callable[[], None]) -> None:
        self.connection, self.timeout_s = connection, timeout_s
        self._before_write = before_write
        # Since the start: by method, and by class of error.
        self.requests: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self._slots = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        check = self._before_write

        class CheckedRequest(aiohttp.ClientRequest):
            async def send(self, conn: Any) -> aiohttp.ClientResponse:
                if self.method != "GET":
                    check()
                return await super().send(conn)

        connector = aiohttp.TCPConnector(ssl=self.connection.tls(), limit=MAX_IN_FLIGHT)
        self._session = aiohttp.ClientSession(
            base_url=self.connection.server,
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=self.timeout_s),
            headers={"User-Agent": FIELD_MANAGER},
            request_class=CheckedRequest,
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._session is not None:
            await self._session.close()

    def check_leading(self) -> None:
        """Before something is done that is no call to the API server: see `before_write`."""
        self._before_write()

    async def get(self, path: str, **query: str) -> Object:
        return await self.call("GET", path, query=query)

    async def find(self, path: str) -> Object | None:
        """None for what does not exist."""
        try:
            return await self.get(path)
        except NotFound:
            return None

    async def items(self, kind: str, namespace: str, **query: str) -> list[Object]:
        """All objects of `kind`, live."""
        return [item async for page in self.pages(kind, namespace, PAGE_ITEMS, **query) for item in page]

    async def pages(self, kind: str, namespace: str, limit: int, **query: str) -> AsyncIterator[list[Object]]:
        """The same, `limit` at a time: who keeps little of each never has them all."""
        token = ""
        while True:
            paging = {"limit": str(limit)} | ({"continue": token} if token else {})
            told = await self.get(KINDS[kind].path(namespace), **query, **paging)
            yield told["items"]
            token = told["metadata"].get("continue", "")
            if not token:
                return

    async def create(self, item: Mapping[str, Any], **query: str) -> Object:
        """Raises Conflict if the name is taken: nothing is touched then."""
        path = KINDS[item["kind"]].path(item["metadata"]["namespace"])
        return await self.call("POST", path, item, query={"fieldManager": FIELD_MANAGER} | query)

    async def replace(self, item: Object) -> Object:
        """The whole of it. Raises Conflict if its resourceVersion is not that of `item`, NotFound if it has gone."""
        path = KINDS[item["kind"]].path(item["metadata"]["namespace"], item["metadata"]["name"])
        return await self.call("PUT", path, item, query={"fieldManager": FIELD_MANAGER})

    async def patch(self, path: str, content: str, body: Any, **query: str) -> Object:
        """A JSON patch begins with tests of what was seen. Raises Conflict where they fail; the API server says 422."""
        try:
            return await self.call("PATCH", path, body, content, {"fieldManager": FIELD_MANAGER} | query)
        except Invalid as error:
            if content != JSON_PATCH:
                raise
            raise Conflict(error.code, error.reason, error.message) from error

    async def delete(self, path: str, uid: str, resource_version: str = "") -> None:
        """In the background. Raises Conflict if it is another one than was seen."""
        seen = {"uid": uid} | ({"resourceVersion": resource_version} if resource_version else {})
        await self.call("DELETE", path, {"preconditions": seen, "propagationPolicy": "Background"})

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        content: str = "application/json",
        query: Mapping[str, str] | None = None,
    ) -> Object:
        """Raises Unreachable, Refused or one of its subclasses."""
        self.requests[method] += 1
        try:
            return await self._call(method, path, body, content, query)
        except ClusterError as error:
            # That something is not there is an answer.
            if not isinstance(error, NotFound):
                self.errors[type(error).__name__] += 1
            raise

    async def _call(self, method: str, path: str, body: Any, content: str, query: Mapping[str, str] | None) -> Object:
        assert self._session is not None, "entered"
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = content
        try:
            if token := self.connection.bearer():
                headers["Authorization"] = f"Bearer {token}"
            data = None if body is None else encode(body)
            async with self._slots:
                async with self._session.request(method, path, data=data, headers=headers, params=query) as answer:
                    return _read(answer.status, await answer.read())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"{method} {path}: {error!r}") from error


def encode(body: Any) -> bytes:
    """JSON exactly as Go writes it again: the API server compares a ControllerRevision's data byte by byte, and whoever
    patches it strategically, as its garbage collector does, has all of it written anew."""
    text = json.dumps(body, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
    return text.translate(_ESCAPED_BY_GO).encode()


def _read(code: int, body: bytes) -> Object:
    try:
        told: Object = json.loads(body)
    except ValueError:
        told = {"message": body.decode(errors="replace")[:500]}
    if 200 <= code < 300:
        return told
    error = {403: Forbidden, 404: NotFound, 409: Conflict, 400: Invalid, 422: Invalid, 500: Failed}.get(code, Refused)
    raise error(code, str(told.get("reason", "")), str(told.get("message", "")))
