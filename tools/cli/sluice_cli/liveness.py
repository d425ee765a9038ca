"""What a kubelet does for a pod: asks each supervisor whether it lives, and condemns a service whose does not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from sluice_engine.probe_client import NoAnswer, ask

PERIOD_S, TIMEOUT_S, FAILURES = 2.0, 2.0, 3


async def problem(url: str, timeout_s: float = TIMEOUT_S) -> str:
    """Why the supervisor at `url` does not count as alive now; empty when it does."""
    try:
        status, body = await ask(url, "/livez", timeout_s)
    except NoAnswer as error:
        return f"its supervisor does not answer /livez: {error}"
    return "" if status == 200 else f"its supervisor answers /livez with {status}{_verdict(body)}"


def _verdict(body: bytes) -> str:
    try:
        told = json.loads(body)
        return f": {told['verdict']}, {told['reason']}, {told['culprit']}"
    except (ValueError, KeyError, TypeError):
        return ""


async def look_after(url: str, condemn: Callable[[str], None], period_s: float = PERIOD_S) -> None:
    """Until FAILURES in a row; then `condemn(why)`, once."""
    failures = 0
    while failures < FAILURES:
        why = await problem(url)
        failures = failures + 1 if why else 0
        if failures < FAILURES:
            await asyncio.sleep(period_s)
    condemn(f"{why}, {FAILURES} times in a row")
