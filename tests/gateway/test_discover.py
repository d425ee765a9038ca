"""Discovery over HTTP: what is seen follows the API server, and stays when that is away or talks nonsense."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
from slice_server import SliceServer
from tls_folder import authority, leaf

from sluice_gateway.routing import discover, slice_api
from sluice_gateway.routing.discover import Discovery, discovering, parse_target
from sluice_gateway.routing.fleet import Fleet
from sluice_gateway.routing.slice_api import HttpSliceApi
from sluice_runtime.cluster_connection import Connection
from sluice_runtime.tls.identity import Identity, context_of

pytestmark = pytest.mark.slow

TARGET = parse_target("ns/m-prefill,m-decode")


def make_slice(*hosts: str) -> dict[str, Any]:
    endpoints = [{"addresses": [host], "targetRef": {"uid": f"uid-{host}"}} for host in hosts]
    return {"addressType": "IPv4", "ports": [{"name": "engine", "port": 7000}], "endpoints": endpoints}


class World:
    """A discovery that follows `server`."""

    def __init__(self, server: SliceServer) -> None:
        self.server = server
        self.fleets: list[Fleet] = []
        self.discovery: Discovery

    @property
    def hosts(self) -> set[str]:
        members = self.fleets[-1].members if self.fleets else ()
        return {member.address.partition(":")[0] for member in members}

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not is_so():  # noqa: ASYNC110 - the other end is a real server
                await asyncio.sleep(0.01)

    async def sees(self, *hosts: str) -> None:
        await self.until(lambda: self.hosts == set(hosts))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discover, "FIRST_BACKOFF_S", 0.02)
    monkeypatch.setattr(discover, "MOST_BACKOFF_S", 0.1)
    monkeypatch.setattr("sluice_gateway.routing.slices.LINGER_S", 0.2)
    monkeypatch.setattr(discover, "LINGER_S", 0.2)


@asynccontextmanager
async def following(server: SliceServer, url: str, watch_s: float = 30.0, **more: Any) -> AsyncIterator[World]:
    world = World(server)
    connection = Connection(url, **more)
    async with HttpSliceApi(connection, TARGET, list_s=5.0, watch_s=watch_s) as api:
        world.discovery = Discovery(api, world.fleets.append, random=Random(1))
        async with discovering(world.discovery):
            yield world


@pytest.fixture
async def server() -> AsyncIterator[tuple[SliceServer, str]]:
    server = SliceServer()
    url = await server.start()
    yield server, url
    await server.stop()


@pytest.fixture
async def world(server: tuple[SliceServer, str]) -> AsyncIterator[World]:
    """One engine is seen, and the watch is open."""
    server[0].put("one", make_slice("10.0.0.1"))
    async with following(*server) as world:
        await world.sees("10.0.0.1")
        await world.until(lambda: server[0].watches == 1)
        yield world


async def test_engines_come_and_go_with_their_slices_over_one_watch(world: World) -> None:
    world.server.put("two", make_slice("10.0.0.2", "10.0.0.3"))
    await world.sees("10.0.0.1", "10.0.0.2", "10.0.0.3")
    world.server.put("two", make_slice("10.0.0.3"))
    await world.sees("10.0.0.1", "10.0.0.3")
    world.server.put("one", None)
    await world.sees("10.0.0.3")
    assert (world.server.lists, world.server.watches) == (1, 1)
    assert world.server.selectors == {"kubernetes.io/service-name in (m-prefill,m-decode)"}
    assert all(member.role is None for member in world.fleets[-1].members)


async def test_a_pod_between_two_slices_is_never_lost(world: World) -> None:
    seen = len(world.fleets)
    world.server.put("one", make_slice())
    world.server.put("two", make_slice("10.0.0.1"))
    world.server.put("mark", make_slice("10.0.0.9"))
    await world.sees("10.0.0.1", "10.0.0.9")
    assert all("10.0.0.1:7000" in {m.address for m in fleet.members} for fleet in world.fleets[seen:])


async def test_a_watch_that_is_cut_goes_on_where_it_was(world: World) -> None:
    world.server.cut()
    world.server.put("two", make_slice("10.0.0.2"))
    await world.sees("10.0.0.1", "10.0.0.2")


async def test_a_version_that_is_forgotten_means_to_list_anew(world: World) -> None:
    world.server.put("gone", make_slice("10.0.0.7"))
    await world.sees("10.0.0.1", "10.0.0.7")
    world.server.silent = True
    world.server.cut()
    await world.until(lambda: world.server.watches >= 2)
    # What happens now is told to nobody, and forgotten before anybody asks.
    world.server.put("gone", None)
    world.server.put("two", make_slice("10.0.0.2"))
    world.server.compact()
    world.server.silent = False
    world.server.cut()
    await world.sees("10.0.0.1", "10.0.0.2")
    assert world.server.lists >= 2


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (410, '{"code": 410, "reason": "Expired", "message": "old"}'),
        (500, "internal error"),
        (429, '{"code": 429, "reason": "TooManyRequests", "message": "later"}'),
        (200, "this is no JSON"),
        (200, "{}"),
        (200, '{"items": 3, "metadata": {"resourceVersion": "1"}}'),
        (200, '{"items": []}'),
        (200, "[]"),
    ],
)
async def test_whatever_a_listing_says_instead_the_last_view_stays(world: World, status: int, body: str) -> None:
    world.server.list_fails = [(status, body)] * 3
    world.server.watch_fails = [(410, "{}")]
    world.server.cut()
    await world.until(lambda: not world.server.list_fails)
    assert world.hosts == {"10.0.0.1"}
    await world.until(lambda: world.discovery.trouble == "" and world.server.lists >= 5)
    assert world.hosts == {"10.0.0.1"}
    world.server.put("two", make_slice("10.0.0.2"))
    await world.sees("10.0.0.1", "10.0.0.2")


@pytest.mark.parametrize(
    "line",
    ["nonsense", "[]", "7", '{"type": "DREAMT", "object": {}}', '{"type": "ADDED"}', '{"type": "ERROR", "object": 3}'],
)
async def test_a_watch_that_talks_nonsense_is_begun_anew(world: World, line: str) -> None:
    world.server.watch_fails = [(200, line + "\n")]
    world.server.cut()
    await world.until(lambda: not world.server.watch_fails)
    world.server.put("two", make_slice("10.0.0.2"))
    await world.sees("10.0.0.1", "10.0.0.2")


async def test_watches_that_end_at_once_are_not_begun_in_a_tight_loop(world: World) -> None:
    world.server.watch_fails = [(200, "")] * 1000
    before = world.server.watches
    world.server.cut()
    await asyncio.sleep(1.0)
    assert world.server.watches - before < 10
    world.server.watch_fails.clear()
    world.server.put("two", make_slice("10.0.0.2"))
    await world.sees("10.0.0.1", "10.0.0.2")


async def test_a_slice_that_makes_no_sense_costs_nobody_else(world: World) -> None:
    world.server.put("bad", {"addressType": 7, "endpoints": "none"})
    world.server.put("two", make_slice("10.0.0.2"))
    await world.sees("10.0.0.1", "10.0.0.2")


async def test_a_server_that_is_away_takes_nobody_away(server: tuple[SliceServer, str]) -> None:
    first, url = server
    first.put("one", make_slice("10.0.0.1"))
    async with following(first, url) as world:
        await world.sees("10.0.0.1")
        await first.stop()
        await world.until(lambda: "127.0.0.1" in world.discovery.trouble)
        assert world.hosts == {"10.0.0.1"}


async def test_a_silent_watch_is_given_up_and_nothing_stays_unseen(
    server: tuple[SliceServer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slice_api, "WATCH_SLACK_S", 0.2)
    first, url = server
    first.put("one", make_slice("10.0.0.1"))
    first.silent = True
    async with following(first, url, watch_s=0.5) as world:
        await world.sees("10.0.0.1")
        first.put("two", make_slice("10.0.0.2"))
        await world.until(lambda: first.watches >= 2)
        first.silent = False
        await world.sees("10.0.0.1", "10.0.0.2")


async def test_the_token_is_read_anew_for_each_request(server: tuple[SliceServer, str], tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("one\n")
    async with following(*server, token_file=token) as world:
        await world.until(lambda: server[0].watches == 1)
        token.write_text("two\n")
        server[0].cut()
        await world.until(lambda: "Bearer two" in server[0].tokens)
    assert server[0].tokens[0] == "Bearer one"


async def test_a_missing_right_is_named_with_its_remedy(server: tuple[SliceServer, str]) -> None:
    told = {"code": 403, "reason": "Forbidden", "message": "may not list"}
    server[0].list_fails = [(403, json.dumps(told))] * 100
    async with following(*server) as world:
        await world.until(lambda: "get, list and watch endpointslices" in world.discovery.trouble)
    assert "namespace ns" in world.discovery.trouble


async def test_a_gateway_meets_discovered_engines_and_asks_them_what_they_are(start: Any, server: Any) -> None:
    stack = await start()
    engines = stack.fleet.engines
    engines["10.0.0.1:7000"], engines["10.0.0.2:7000"] = engines["p1"], engines["d1"]
    first, url = server
    first.put("m-prefill-x", make_slice("10.0.0.1"))
    async with HttpSliceApi(Connection(url), TARGET) as api:
        async with discovering(Discovery(api, stack.gateway.members.set_fleet, random=Random(1))):
            await stack.until(lambda: stack.gateway.members.links.keys() == {"10.0.0.1:7000"})
            await stack.until(lambda: "no prefill and decode engine" in stack.gateway.not_ready())
            first.put("m-decode-x", make_slice("10.0.0.2"))
            await stack.ready()
            assert (await stack.chat()).status_code == 200
            roles = {engine["address"]: engine["role"] for engine in stack.gateway.report()["engines"]}
            assert roles == {"10.0.0.1:7000": "prefill", "10.0.0.2:7000": "decode"}


class Unchecked(Connection):
    """Whoever answers is believed."""

    def tls(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context


@contextmanager
def watched_by_one_who_hears_no_more(issued: Any) -> Iterator[tuple[str, threading.Event]]:
    """(URL, set when a watch has begun). One connection, over which nothing is read after its request."""
    context = context_of(Identity.of(issued.data()), ssl.PROTOCOL_TLS_SERVER)
    listener = socket.create_server(("127.0.0.1", 0))
    begun, over = threading.Event(), threading.Event()

    def serve() -> None:
        with listener, context.wrap_socket(listener.accept()[0], server_side=True) as connection:
            connection.recv(65536)
            event = json.dumps({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "2"}}}) + "\n"
            head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
            connection.sendall(f"{head}{len(event):x}\r\n{event}\r\n".encode())
            begun.set()
            over.wait(60)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"https://127.0.0.1:{listener.getsockname()[1]}", begun
    finally:
        over.set()
        thread.join(10)


async def test_a_watch_that_is_given_up_leaves_no_connection_behind() -> None:
    """Its socket stayed for half a minute, and longer than the loop, where the API server did not say goodbye."""
    with watched_by_one_who_hears_no_more(leaf(authority(), "gateway")) as (url, begun):
        port = int(url.rpartition(":")[2])
        async with HttpSliceApi(Unchecked(url), TARGET) as api:
            watch = api.watched("1")
            assert (await anext(watch))["type"] == "BOOKMARK"
            waiting = asyncio.ensure_future(anext(watch))
            await asyncio.sleep(0)
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                await waiting
        assert begun.is_set()
        await asyncio.sleep(0)
        connections = psutil.Process().net_connections("tcp")
        assert not [c for c in connections if c.raddr and c.raddr.port == port]
