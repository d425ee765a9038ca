"""The status page's data: who is asked how often, what is shown of one that does not answer, and who may look."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from sluice_gateway.memory import MemoryEngine
from sluice_gateway.routing.board import MAX_WATCHERS, PERIOD_S, StatusBoard
from sluice_protocol.generate import Role
from sluice_runtime.probe_client import NoAnswer

BOOKS = {
    "ledger": {"page": {"free": 6, "filling": 1, "live": 3, "stranded": 0}},
    "sequences": {"running": 2, "waiting": 1},
    "rooms": {"source": 0, "reader": 2},
    "waiting": 1,
    "max_running": 8,
    "oldest_waiting_s": 0.5,
    "step": 41,
}


def status(name: str, **more: Any) -> dict[str, Any]:
    """As a supervisor tells."""
    row = {
        "name": "leader.loop", "state": "running", "thread": "alive", "phase": "serving", "phase_s": 1.0, "pending": 0,
        "pending_s": None, "step": 41, "progress": 41, "doing": "", "tid": 7,
    }  # fmt: skip
    return {
        "name": name, "role": "decode", "verdict": "idle", "reason": "", "culprit": "", "doing": "", "age_s": 0.0,
        "budget_s": 0.0, "pending": 0, "started": True, "draining": False, "collecting_evidence": False,
        "quarantined": False, "maintenance_s": 0, "ready": True, "message": "idle", "pids": {"leader": 7},
        "memory_bytes": {"leader": 1 << 20}, "rows": [row], "books": BOOKS, "books_age_s": 0.1, "transfers": None,
        "gateway": None, "events": [{"writer": "supervisor", "age_s": 3.0, "text": "readiness: ready"}],
    } | more  # fmt: skip


def report(*health: str) -> dict[str, Any]:
    engines = [{"address": f"a:{i}", "role": "decode", "trouble": "", "health": url} for i, url in enumerate(health)]
    told = {"model": "m", "ready": True, "reason": "", "queued": 0, "running": 0, "counters": {}}
    return told | {"engines": engines}


class Supervisors:
    """url -> what it says; who is not in it does not answer."""

    def __init__(self, **told: Any) -> None:
        self.told = told
        self.asked: list[str] = []

    async def ask(self, url: str, path: str, timeout_s: float) -> Any:
        self.asked.append(url)
        await asyncio.sleep(0)
        if url not in self.told:
            raise NoAnswer(f"no answer from {url} within {timeout_s:g} s")
        return self.told[url]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_all_who_ask_within_a_second_share_one_look() -> None:
    supervisors, clock = Supervisors(one=status("decode-0")), Clock()
    board = StatusBoard(lambda: report("one"), "", clock, supervisors.ask)
    first = await asyncio.gather(*(board.now() for _ in range(5)))
    clock.now = 0.9 * PERIOD_S
    assert await board.now() == first[0]
    assert supervisors.asked == ["one"]
    clock.now = PERIOD_S
    supervisors.told["one"] = status("decode-0", verdict="progressing")
    assert (await board.now())["services"][0]["verdict"] == "progressing"
    assert supervisors.asked == ["one", "one"]


async def test_nobody_is_asked_while_nobody_watches() -> None:
    supervisors, clock = Supervisors(one=status("decode-0")), Clock()
    board = StatusBoard(lambda: report("one"), "", clock, supervisors.ask)
    stream = board.follow()
    assert json.loads((await anext(stream)).removeprefix(b"data: "))["services"][0]["name"] == "decode-0"
    assert board.watchers == 1
    await stream.aclose()
    assert board.watchers == 0
    clock.now = 100.0
    await asyncio.sleep(0.01)
    assert supervisors.asked == ["one"]


async def test_a_view_has_queues_rooms_pools_and_threads() -> None:
    board = StatusBoard(lambda: report("one"), "own", Clock(), Supervisors(one=status("decode-0")).ask)
    view = await board.now()
    own, engine = view["services"]
    assert (own["name"], own["state"]) == ("gateway", "no answer")
    assert (engine["state"], engine["message"], engine["memory_bytes"]) == ("ready", "", 1 << 20)
    assert engine["queue"] == {"waiting": 1, "running": 2, "max_running": 8, "oldest_s": 0.5}
    assert engine["rooms"] == {"source": 0, "reader": 2}
    assert engine["pools"] == [{"name": "page", "total": 10, "states": BOOKS["ledger"]["page"]}]
    (process,) = engine["processes"]
    assert (process["name"], process["pid"], process["threads"][0]["phase"]) == ("leader", 7, "serving")
    assert view["events"] == [{"service": "decode-0", "writer": "supervisor", "age_s": 3.0, "text": "readiness: ready"}]


async def test_the_newest_event_is_first_and_of_two_of_one_moment_the_later_one() -> None:
    written = [("first", 9.0), ("second", 0.2), ("third", 0.2)]
    events = [{"writer": "supervisor", "age_s": age, "text": text} for text, age in written]
    board = StatusBoard(lambda: report("one"), "", Clock(), Supervisors(one=status("d", events=events)).ask)
    assert [event["text"] for event in (await board.now())["events"]] == ["third", "second", "first"]


@pytest.mark.parametrize(
    ("told", "state", "words"),
    [
        ({"verdict": "wedged", "message": "Wedged: X: y was z"}, "wedged", "Wedged: X: y was z"),
        ({"verdict": "wedged", "quarantined": True, "message": "Wedged: X"}, "quarantined", "Wedged: X"),
        ({"verdict": "dead", "collecting_evidence": True, "message": "Dead: X"}, "collecting evidence", "Dead: X"),
        ({"draining": True, "ready": False}, "draining", ""),
        ({"started": False, "ready": False}, "starting", ""),
        (
            {"verdict": "slow", "culprit": "rank0.device", "doing": "device", "age_s": 20.0, "budget_s": 30.0,
             "reason": "DeviceStuck"},
            "ready",
            "slow: rank0.device is device for 20.0 s of 30.0 s (DeviceStuck if it stays so)",
        ),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_said_in_one_line(told: dict[str, Any], state: str, words: str) -> None:
    board = StatusBoard(lambda: report("one"), "", Clock(), Supervisors(one=status("d", **told)).ask)
    (engine,) = (await board.now())["services"]
    assert (engine["state"], engine["message"]) == (state, words)


async def test_one_that_does_not_answer_keeps_its_name_and_the_others_their_view() -> None:
    supervisors, clock = Supervisors(one=status("decode-0"), two=status("decode-1")), Clock()
    board = StatusBoard(lambda: report("one", "two", ""), "", clock, supervisors.ask)
    await board.now()
    del supervisors.told["one"]
    clock.now = PERIOD_S
    gone, there, silent = (await board.now())["services"]
    assert (gone["name"], gone["answers"], gone["message"]) == ("decode-0", False, "no answer from one within 1 s")
    assert (there["name"], there["answers"]) == ("decode-1", True)
    assert (silent["name"], silent["message"]) == ("a:2", "it did not say where its supervisor answers")
    supervisors.told["one"] = {"hello": "world"}
    clock.now = 2 * PERIOD_S
    assert (await board.now())["services"][0]["message"] == "one is no supervisor of Sluice"


async def test_watchers_are_bounded_and_end_with_the_gateway() -> None:
    board = StatusBoard(lambda: report(), "", Clock(), Supervisors().ask)
    streams = [board.follow() for _ in range(MAX_WATCHERS + 1)]
    first = [await anext(stream) for stream in streams]
    assert first[-1].startswith(b"event: full")
    assert board.watchers == MAX_WATCHERS
    board.close()
    for stream in streams:
        assert [event async for event in stream] == []
    assert board.watchers == 0


async def test_the_page_is_one_file_with_a_policy_that_lets_nothing_else_in(start: Any) -> None:
    stack = await start()
    page = await stack.http.get("/status")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert 'src="' not in page.text
    assert page.text.count("href=") == 1  # an icon that is empty, so that none is asked for
    view = (await stack.http.get("/status/now")).json()
    assert view["gateway"]["ready"] is True
    assert [service["message"] for service in view["services"]] == ["it did not say where its supervisor answers"] * 2


async def test_with_api_keys_page_and_events_need_one(start: Any) -> None:
    stack = await start(api_keys=("sesame",))
    for path in ("/status", "/status/now", "/status/events"):
        assert (await stack.http.get(path)).status_code == 401
        assert (await stack.http.get(path, params={"key": "wrong"})).status_code == 401
    assert (await stack.http.get("/status", params={"key": "sesame"})).status_code == 200
    assert (await stack.http.get("/status/now", headers={"Authorization": "Bearer sesame"})).status_code == 200


async def test_a_watcher_that_goes_away_is_not_watched_for(start: Any) -> None:
    stack = await start()
    async with stack.http.stream("GET", "/status/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            assert json.loads(line.removeprefix("data: "))["gateway"]["model"] == "m"
            break
        assert stack.gateway.board.watchers == 1
    await stack.until(lambda: stack.gateway.board.watchers == 0)


async def test_a_watcher_does_not_hold_up_the_end(start: Any) -> None:
    stack = await start({"u": MemoryEngine(Role.UNIFIED, lambda _prompt, _position: 65, pid=1)}, shutdown_s=60.0)
    seen = asyncio.Event()

    async def watch() -> None:
        async with httpx.AsyncClient(base_url=stack.url, timeout=60) as http:
            async with http.stream("GET", "/status/events") as response:
                async for _line in response.aiter_lines():
                    seen.set()

    watching = asyncio.create_task(watch())
    await seen.wait()
    stack.server.ask_to_exit()
    async with asyncio.timeout(20):
        await watching
