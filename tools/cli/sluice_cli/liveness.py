"""What a kubelet does for a pod: asks each supervisor whether it lives, and condemns a service whose does not."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

from sluice_engine.supervisor.zygote_link import PING
from sluice_runtime.probe_client import AskerFailed, NoAnswer, ask, is_our_own

PERIOD_S, TIMEOUT_S, FAILURES = 2.0, 2.0, 3


async def problem(url: str, timeout_s: float = TIMEOUT_S) -> str:
    """Why the supervisor at `url` does not count as alive now; empty when it does, or when it could not be asked."""
    try:
        status, body = await ask(url, "/livez", timeout_s)
    except AskerFailed as error:
        _own_trouble(str(error))
        return ""
    except NoAnswer as error:
        return f"its supervisor does not answer /livez: {error}"
    return "" if status == 200 else f"its supervisor answers /livez with {status}{_verdict(body)}"


def _own_trouble(why: str) -> None:
    """Ending services that are well would be no help."""
    print(f"sluice up: nobody can be looked after at the moment: {why}", file=sys.stderr)


def _verdict(body: bytes) -> str:
    try:
        told = json.loads(body)
        return f": {told['verdict']}, {told['reason']}, {told['culprit']}"
    except (ValueError, KeyError, TypeError):
        return ""


async def look_after(
    url: str,
    condemn: Callable[[str], None],
    period_s: float = PERIOD_S,
    doubt: Callable[[str], None] = lambda why: None,
) -> None:
    """Until FAILURES in a row; then `condemn(why)`, once. `doubt(why)` hears of the first of them."""
    failures = 0
    while failures < FAILURES:
        why = await problem(url)
        failures = failures + 1 if why else 0
        if failures == 1:
            doubt(why)
        if failures < FAILURES:
            await asyncio.sleep(period_s)
    condemn(f"{why}, {FAILURES} times in a row")


async def zygote_problem(socket: Path, timeout_s: float = TIMEOUT_S) -> str:
    """Why the zygote does not count as alive now; empty when it answers, or when it could not be asked."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_unix_connection(str(socket))
            try:
                writer.write(PING)
                return "" if await reader.readline() else "it ends what is asked of it"
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        if is_our_own(error):
            _own_trouble(str(error))
            return ""
        return f"it does not answer: {str(error) or f'not within {timeout_s:.0f} s'}"


async def look_after_zygote(
    socket: Path, is_needed: Callable[[], bool], condemn: Callable[[str], None], period_s: float = PERIOD_S
) -> None:
    """For ever. All ranks hang on it: `condemn` must not end those that run."""
    failures = 0
    while True:
        await asyncio.sleep(period_s)
        why = await zygote_problem(socket) if is_needed() else ""
        failures = failures + 1 if why else 0
        if failures == FAILURES:
            condemn(f"{why}, {FAILURES} times in a row, while an engine waits for a rank")
