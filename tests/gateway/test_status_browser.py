"""The status page as a person sees it, in headless Chromium over real engines."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Page, browser, chromium
from stack_double import RunningStack

from sluice_launch.process import eventually

pytestmark = [pytest.mark.process, pytest.mark.timeout(170)]
# A wedge is named soon, and its service stays to be looked at.
HEALTH = {"floor_s": 2.0, "quarantine_after": 1, "quarantine_s": 600.0}


@pytest.fixture
def stack() -> Iterator[RunningStack]:
    chromium()
    with RunningStack(spec={"health": HEALTH}) as running:
        running.start("prefill", "decode")
        running.start_gateway(health={})
        yield running


def text(page: Page, selector: str) -> str:
    return str(page.value(f"(document.querySelector({selector!r}) || {{innerText: ''}}).innerText"))


def answered(page: Page) -> int:
    """-1 before the first event."""
    told = text(page, "#gateway").split("\n")
    return int(told[told.index("answered") - 1]) if "answered" in told else -1


def is_within_its_width(page: Page) -> bool:
    return bool(page.value("document.documentElement.scrollWidth <= innerWidth"))


def test_numbers_are_live_and_a_wedged_engine_is_shown_with_its_culprit(stack: RunningStack, tmp_path: Path) -> None:
    with browser() as page:
        page.open(f"{stack.url}/status")
        eventually(lambda: answered(page) == 0, "the first event is shown")
        shown = page.value("[...document.querySelectorAll('article h3')].map(e => e.innerText)")
        assert sorted(shown) == ["decode-0", "gateway", "prefill-0"]
        assert text(page, "#overall") == "all well"
        assert "page records\nempty of 16,384" in text(page, "article[data-service=decode-0]")

        page.value("window.stays = true")
        assert stack.chat("hi").text()
        eventually(lambda: answered(page) == 1, "the answer is counted on the page")
        assert page.value("window.stays") is True  # nobody loaded it again

        stack._note_pids()
        os.kill(stack.engines["decode-0"].pid("rank"), signal.SIGSTOP)
        decode = "article[data-service=decode-0]"

        def wedged() -> Any:
            return "quarantined" in text(page, f"{decode} .pill") and "rank0.loop" in text(page, f"{decode} .trouble")

        eventually(wedged, "the wedged engine is shown with its culprit")
        assert "Wedged: RankFrozen: rank0.loop" in text(page, f"{decode} .trouble")
        assert text(page, "#overall") == "1 of 3 in trouble"
        assert "verdict: Wedged: RankFrozen" in text(page, "#events")
        page.value(f"document.querySelector('{decode} details').open = true")
        eventually(lambda: "loop" in text(page, f"{decode} tr.bad"), "the culprit's thread is marked")
        assert is_within_its_width(page)
        page.screenshot(tmp_path / "status-wide.png")
        page.resize(390, 844)
        page.dark()
        assert is_within_its_width(page)
        page.screenshot(tmp_path / "status-phone-dark.png")
    for name in ("status-wide.png", "status-phone-dark.png"):
        assert (tmp_path / name).stat().st_size > 10_000
