"""The queue of ModelDeployments to look at."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from sluice_operator.live.work import Work

A, B = ("ns", "a"), ("ns", "b")


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def work(clock):
    return Work(clock)


async def taken(work):
    """Whoever can be had without waiting."""
    try:
        async with asyncio.timeout(0):
            return await work.take()
    except TimeoutError:
        return None


async def test_much_news_of_one_is_one_look(work, clock):
    for _ in range(5):
        work.add(A)
    clock.now = 1.0
    assert await taken(work) == A
    work.done(A, None)
    assert await taken(work) is None


async def test_one_is_with_one_worker_at_a_time_and_news_meanwhile_is_not_lost(work, clock):
    work.add(A, 0)
    assert await taken(work) == A
    work.add(A, 0)
    work.add(B, 0)
    assert await taken(work) == B
    assert await taken(work) is None
    work.done(A, None)
    assert await taken(work) == A


async def test_news_comes_before_the_next_look_that_was_planned(work, clock):
    work.add(A, 0)
    assert await taken(work) == A
    work.done(A, 60.0)
    work.add(A, 0.1)
    clock.now = 0.2
    assert await taken(work) == A
    work.done(A, None)
    clock.now = 61.0
    assert await taken(work) is None


async def test_failures_wait_longer_and_longer_even_if_there_is_news(work, clock):
    waits = []
    for _ in range(8):
        work.add(A, 0)
        while await taken(work) is None:
            clock.now += 0.5
        work.failed(A)
        waits.append(clock.now)
        clock.now += 0.25
        assert await taken(work) is None
    gaps = [later - earlier for earlier, later in itertools.pairwise(waits)]
    assert gaps == sorted(gaps)
    assert gaps[0] <= 1.5
    assert gaps[-1] <= 60.5


async def test_after_a_success_failures_count_from_the_start(work, clock):
    for _ in range(4):
        work.add(A, 0)
        clock.now += 100
        assert await taken(work) == A
        work.failed(A)
    clock.now += 100
    assert await taken(work) == A
    work.done(A, None)
    work.add(A, 0)
    assert await taken(work) == A
    work.failed(A)
    clock.now += 1.0
    assert await taken(work) == A


async def test_a_worker_that_waits_hears_of_news(work, clock):
    waiting = asyncio.create_task(work.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    work.add(B, 0)
    assert await asyncio.wait_for(waiting, 5) == B


async def test_depth_counts_what_waits_and_what_is_being_done(work, clock):
    work.add(A, 0)
    work.add(B, 50)
    assert work.depth == 2
    await taken(work)
    assert work.depth == 2
    work.done(A, None)
    assert work.depth == 1
