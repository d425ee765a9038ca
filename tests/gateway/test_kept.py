"""What runs beside the requests for as long as a gateway lives: it goes on whatever it meets, and its end is told."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest

from sluice_gateway.gateway import Gateway
from sluice_gateway.memory import MemoryFleet
from sluice_gateway.routing.fleet import Fleet, FleetError, Member
from sluice_gateway.routing.link import Link, Timings
from sluice_gateway.routing.members import read_fleet, watch_fleet
from sluice_gateway.routing.route import no_keys
from sluice_gateway.settings import Settings
from sluice_gateway.status.marks import GatewayMarks
from sluice_gateway.status.watched_rows import GATEWAY_KIND
from sluice_gateway.text.encoding import MESSAGE_CHARACTERS
from sluice_gateway.text.prepare import THREAD_CHARACTERS
from sluice_gateway.text.tokenizer import load_tokenizer
from sluice_protocol.generate import Role
from sluice_runtime.health.layout import State
from sluice_runtime.health.reading import Copy
from sluice_runtime.health.recorder import Recorder

TOO_DEEP = "[" * 200_000


def written(path: Path, address: str) -> Fleet:
    path.write_text(json.dumps({"members": [{"role": "decode", "address": address}]}))
    return Fleet((Member(Role.DECODE, address),))


async def until(is_so) -> None:  # type: ignore[no-untyped-def]
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


async def test_a_fleet_file_may_hold_anything_and_is_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that was nested too deeply ended the watch, and every later change was missed without a word."""
    path, seen = tmp_path / "fleet.json", []
    first = written(path, "127.0.0.1:1")
    watching = asyncio.create_task(watch_fleet(path, seen.append, 0.005))
    await until(lambda: seen == [first])
    for bad in (TOO_DEEP, "\x00", "[]", '{"members":{}}', '{"members":[{"role":7,"address":[]}]}'):
        path.write_text(bad)
        with pytest.raises(FleetError):
            read_fleet(path)
        lines = len(caplog.records)
        await until(lambda lines=lines: len(caplog.records) > lines)
    second = written(path, "127.0.0.1:22")
    await until(lambda: seen == [first, second])
    watching.cancel()


async def test_a_defect_of_ours_ends_one_round_of_the_watch(tmp_path: Path) -> None:
    path, seen = tmp_path / "fleet.json", []

    def set_fleet(fleet: Fleet) -> None:
        seen.append(fleet)
        if len(seen) == 1:
            raise ArithmeticError("a defect")

    first = written(path, "127.0.0.1:1")
    watching = asyncio.create_task(watch_fleet(path, set_fleet, 0.005))
    await until(lambda: seen == [first])
    second = written(path, "127.0.0.1:22")
    await until(lambda: seen == [first, second])
    watching.cancel()


async def test_a_link_outlives_a_client_that_cannot_be_made() -> None:
    tries = []

    def no_client(member: Member) -> None:
        tries.append(member)
        raise ArithmeticError("a defect")

    timings = Timings(first_backoff_s=0.001, most_backoff_s=0.001)
    link = Link(Member(Role.DECODE, "d1"), no_client, "gw", lambda: None, timings)  # type: ignore[arg-type]
    task = asyncio.create_task(link.run())
    await until(lambda: len(tries) > 2)
    assert "a defect" in link.view.trouble
    task.cancel()


async def test_one_that_ends_is_the_gateways_end(tmp_path: Path) -> None:
    recorder = Recorder.create(tmp_path / "recorder", GATEWAY_KIND.recorded)
    settings = Settings("m", "gw", Fleet(()))
    clients = MemoryFleet({}).factory
    gateway = Gateway(settings, load_tokenizer("bytes"), clients, lambda: 0.0, Random(1), no_keys, recorder=recorder)
    await gateway.start()

    async def ends() -> None:
        raise ArithmeticError("a defect")

    gateway._keep(ends(), "somebody")
    await until(lambda: Copy(recorder.view).rows()["gateway.loop"].state is State.FAILED)
    assert "somebody has ended: ArithmeticError" in Copy(recorder.view).rows()["gateway.loop"].doing
    await gateway.close()


async def test_a_body_of_many_entries_is_looked_at_off_the_loop(start: Any) -> None:
    """A million empty messages fit into a body: the loop stood for 16 s, and all other answers with it."""
    stack, threads = await start(), []
    gateway = stack.gateway

    def parse(body: Any, limits: object) -> Any:
        threads.append(threading.current_thread())
        return body

    assert await gateway.preparation.checked(b"[1]", parse) == [1]
    await gateway.preparation.checked(b"[" + b"1," * THREAD_CHARACTERS + b"1]", parse)
    assert [thread is threading.main_thread() for thread in threads] == [True, False]
    many = [{"role": "user", "content": ""}] * (THREAD_CHARACTERS // MESSAGE_CHARACTERS + 1)
    tokenized = []
    gateway.marks.tokenize = lambda size, work: tokenized.append(size) or gateway_tokenize(size, work)
    gateway_tokenize = GatewayMarks.tokenize.__get__(gateway.marks)
    await stack.chat(messages=many, max_tokens=1)
    assert tokenized[-1] == len(many) * MESSAGE_CHARACTERS
    refused = await stack.chat(messages=[{"role": "user", "content": ""}] * 65_537, max_tokens=1)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    parts = [{"type": "text", "text": ""}] * 65_537
    refused = await stack.chat(messages=[{"role": "user", "content": parts}], max_tokens=1)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages[0].content")
