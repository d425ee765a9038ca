"""A small API server for EndpointSlices that can be told to misbehave: 410, 500, garbage, cut and silent watches."""

from __future__ import annotations

import asyncio
import json
import ssl
from typing import Any

from aiohttp import web

PATH = "/apis/discovery.k8s.io/v1/namespaces/ns/endpointslices"


class SliceServer:
    """`lists`, `watches`: how often it was asked. `fails`: what the next requests get instead, of each kind of its own:
    (status, body). `silent`: a watch says nothing, not even what changes. `tokens`: that it was shown."""

    def __init__(self) -> None:
        self.slices: dict[str, dict[str, Any]] = {}
        self.version = 1
        self.oldest = 0
        self.lists = self.watches = 0
        self.list_fails: list[tuple[int, str]] = []
        self.watch_fails: list[tuple[int, str]] = []
        self.silent = False
        self.tokens: list[str] = []
        self.selectors: set[str] = set()
        self._history: list[tuple[int, str, dict[str, Any]]] = []
        self._news = asyncio.Event()
        self._open: set[asyncio.Task[Any]] = set()

    async def start(self, tls: ssl.SSLContext | None = None) -> str:
        app = web.Application()
        app.router.add_get(PATH, self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        return f"{'http' if tls is None else 'https'}://{host}:{port}"

    async def stop(self) -> None:
        self.cut()
        await self._runner.cleanup()

    def put(self, name: str, item: dict[str, Any] | None) -> None:
        """None: it is deleted."""
        self.version += 1
        meta = {"name": name, "resourceVersion": str(self.version)}
        if item is None:
            event, told = "DELETED", {**self.slices.pop(name), "metadata": meta}
        else:
            event, told = "MODIFIED" if name in self.slices else "ADDED", {**item, "metadata": meta}
            self.slices[name] = told
        self.send(event, told)

    def send(self, event: str, told: dict[str, Any]) -> None:
        self._history.append((self.version, event, told))
        self._news.set()
        self._news = asyncio.Event()

    def compact(self) -> None:
        """What was before is forgotten; who watches from there is told so."""
        self.oldest = self.version

    def cut(self) -> None:
        """Every open watch loses its connection."""
        for task in self._open:
            task.cancel()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.tokens.append(request.headers.get("Authorization", ""))
        self.selectors.add(request.query.get("labelSelector", ""))
        if "watch" in request.query:
            self.watches += 1
            if self.watch_fails:
                return refuse(*self.watch_fails.pop(0))
            return await self._watch(request)
        self.lists += 1
        if self.list_fails:
            return refuse(*self.list_fails.pop(0))
        meta = {"resourceVersion": str(self.version)}
        return web.json_response({"metadata": meta, "items": list(self.slices.values())})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)
        if since < self.oldest:
            status = {"code": 410, "reason": "Expired", "message": "too old resource version"}
            await response.write(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
            return response
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                while True:
                    news = self._news
                    for version, event, told in self._history if not self.silent else ():
                        if version > since:
                            line = json.dumps({"type": event, "object": told}).encode() + b"\n"
                            # In pieces, for that is how they may come.
                            await response.write(line[:7])
                            await response.write(line[7:])
                            since = version
                    await news.wait()
        except TimeoutError:
            return response
        finally:
            self._open.discard(task)


def refuse(status: int, body: str) -> web.Response:
    return web.Response(status=status, text=body)
