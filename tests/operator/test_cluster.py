"""Calls to an API server that is a few lines of a test, over real HTTP on loopback."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sluice_operator.live.cluster import Cluster, Conflict, Forbidden, Invalid, NotFound, Refused, Unreachable
from sluice_operator.live.connection import Connection

POD = {"kind": "Pod", "metadata": {"name": "p", "namespace": "ns"}}


class Api:
    """Remembers what it was asked; `answers`: what it says, in order, then 200 and {}."""

    def __init__(self):
        self.asked, self.answers, self.checks = [], [], 0
        self.may_write = True
        self.answer_s = 0.0

    async def handle(self, request):
        self.asked.append((request.method, request.path_qs, await request.text()))
        await asyncio.sleep(self.answer_s)
        status, body = self.answers.pop(0) if self.answers else (200, {})
        return web.json_response(body, status=status)

    def check(self):
        self.checks += 1
        if not self.may_write:
            raise PermissionError("no longer")


@pytest.fixture
async def api():
    return Api()


@pytest.fixture
async def cluster(api):
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", api.handle)
    async with TestServer(application) as server:
        connection = Connection(str(server.make_url("/")), token="t")
        async with Cluster(connection, 5.0, api.check) as cluster:
            yield cluster


WRITES = {
    "create": lambda cluster: cluster.create(POD),
    "patch": lambda cluster: cluster.patch("/x", "application/merge-patch+json", {}),
    "delete": lambda cluster: cluster.delete("/x", "uid"),
    "put": lambda cluster: cluster.call("PUT", "/x", {}),
}


@pytest.mark.parametrize("write", WRITES)
async def test_each_write_is_checked_and_a_refused_one_never_leaves(api, cluster, write):
    await WRITES[write](cluster)
    assert (len(api.asked), api.checks) == (1, 1)
    api.may_write = False
    with pytest.raises(Unreachable, match="no longer"):
        await WRITES[write](cluster)
    assert len(api.asked) == 1


async def test_reads_are_not_checked(api, cluster):
    api.may_write = False
    assert await cluster.get("/x") == {}
    assert api.checks == 0


async def test_no_answer_in_time_is_an_error_of_its_own(api, cluster):
    api.answer_s, cluster._session._timeout = 60.0, cluster._session._timeout.__class__(total=0.2)
    with pytest.raises(Unreachable, match="TimeoutError"):
        await cluster.get("/x")


@pytest.mark.parametrize(
    ("code", "error"),
    [(404, NotFound), (409, Conflict), (422, Invalid), (400, Invalid), (403, Forbidden), (500, Refused)],
)
async def test_refusals_have_the_api_servers_own_words(api, cluster, code, error):
    api.answers = [(code, {"reason": "Why", "message": "because"})]
    with pytest.raises(error, match=f"{code} Why: because") as caught:
        await cluster.get("/x")
    assert caught.value.code == code


async def test_what_does_not_exist_is_none(api, cluster):
    api.answers = [(404, {})]
    assert await cluster.find("/x") is None


async def test_listings_come_in_pages(api, cluster):
    api.answers = [
        (200, {"items": [{"n": 1}], "metadata": {"continue": "more"}}),
        (200, {"items": [{"n": 2}], "metadata": {}}),
    ]
    assert await cluster.items("Pod", "ns", labelSelector="a=b") == [{"n": 1}, {"n": 2}]
    assert [path for _, path, _ in api.asked] == [
        "/api/v1/namespaces/ns/pods?labelSelector=a%3Db&limit=500",
        "/api/v1/namespaces/ns/pods?labelSelector=a%3Db&limit=500&continue=more",
    ]


async def test_a_deletion_names_what_was_seen(api, cluster):
    await cluster.delete("/x", "uid-1", "7")
    assert '"preconditions":{"resourceVersion":"7","uid":"uid-1"}' in api.asked[0][2]


async def test_a_json_patch_whose_test_fails_is_a_conflict_and_no_refusal(api, cluster):
    """Somebody had changed replicas a moment before, and status said that the API server refuses our writes."""
    api.answers += [(422, {"reason": "Invalid", "message": "testing value /spec/replicas failed"})] * 2
    with pytest.raises(Conflict, match="testing value"):
        await cluster.patch("/x/scale", "application/json-patch+json", [])
    with pytest.raises(Invalid):
        await cluster.patch("/x", "application/merge-patch+json", {})
