"""The view of a stack as a table in the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sluice_cli.status_words import bar, megabytes, phase_of, seconds

View = Mapping[str, Any]
BAR_CELLS = 30
EVENTS = 8
WIDE = 100
_STYLES = {
    "ready": "green",
    "starting": "cyan",
    "draining": "cyan",
    "not ready": "yellow",
    "wedged": "bold red",
    "dead": "bold red",
    "no answer": "bold red",
    "quarantined": "bold red",
    "collecting evidence": "bold red",
}
_POOL_STYLES = {"live": "blue", "filling": "yellow", "stranded": "red", "quarantined": "red"}


def show(view: View, console: Console | None = None) -> None:
    console = console or Console()
    console.print(render(view, console.width))


def watch(view: View, look: Callable[[], View], period_s: float) -> None:
    """For ever. What `look` raises ends it."""
    with Live(render(view, Console().width), auto_refresh=False) as live:
        while True:
            time.sleep(period_s)
            live.update(render(look(), live.console.width), refresh=True)


def render(view: View, width: int) -> Group:
    """`width`: columns of the terminal; a narrow one gets fewer of ours, and nothing that is not said below them."""
    services = view["services"]
    parts: list[RenderableType] = [_services(services, is_wide=width >= WIDE)]
    parts += [Text(f"{told['name']}: {told['message']}", style=_tone(told)) for told in services if told["message"]]
    parts += [Padding(table, (1, 0, 0, 0)) for table in (_pools(services), _threads(services)) if table]
    if view["events"]:
        parts += [Text("\nlast events", style="bold"), *(_event(event) for event in view["events"][:EVENTS])]
    return Group(*parts)


def _tone(service: View) -> str:
    return "yellow" if service.get("verdict") == "slow" else "red"


def _services(services: list[View], is_wide: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("service", "state", "verdict", *(("culprit", "age") if is_wide else ())):
        table.add_column(name, no_wrap=True)
    for name in ("waiting", "running", "rooms", *(("reads", "lane", "step") if is_wide else ()), "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for service in services:
        state = Text(service["state"], style=_STYLES.get(service["state"], ""))
        if not service["answers"]:
            table.add_row(service["name"], state, "?")
            continue
        age = seconds(service["age_s"]) if service["culprit"] else ""
        blame = (service["culprit"], age) if is_wide else ()
        table.add_row(service["name"], state, service["verdict"], *blame, *_numbers(service, is_wide))
    return table


def _numbers(service: View, is_wide: bool) -> tuple[str, ...]:
    memory = megabytes(service["memory_bytes"])
    if service["role"] == "gateway":
        told = service["gateway"]
        return str(told.get("queued", "")), str(told.get("running", "")), "", *(("", "", "") if is_wide else ()), memory
    queue, rooms, reads = service["queue"], service["rooms"], service["transfers"].get("in_flight", "")
    running = f"{queue['running']}/{queue['max_running']}"
    more = (str(reads), service["transport"].get("lane", ""), str(service["step"])) if is_wide else ()
    return str(queue["waiting"]), running, str(sum(rooms.values())), *more, memory


def _pools(services: list[View]) -> Table | None:
    """A bar per pool; what is free is left empty."""
    pools = [(service["name"], pool) for service in services if service["answers"] for pool in service["pools"]]
    if not pools:
        return None
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("records", "", "", ""):
        table.add_column(title, no_wrap=title == "")
    for name, pool in pools:
        drawn = Text()
        for state, cells in bar(pool["states"], pool["total"], BAR_CELLS):
            drawn.append(("█" if state else "·") * cells, style=_POOL_STYLES.get(state, "dim"))
        told = ", ".join(f"{pool['states'][state]} {state}" for state in _POOL_STYLES if pool["states"].get(state))
        table.add_row(name, pool["name"], drawn, f"{told or 'empty'} of {pool['total']}")
    return table


def _threads(services: list[View]) -> Table | None:
    """A line per thread; service, pid and memory once."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("thread", "", "pid", "memory", "doing", "for", "pending", "since"):
        is_number = title in ("pid", "memory", "for", "since")
        table.add_column(title, overflow="fold", justify="right" if is_number else "left")
    for service in services:
        name = service["name"]
        for process in service.get("processes", ()):
            pid, memory = str(process["pid"] or "gone"), megabytes(process["memory_bytes"])
            for thread in process["threads"] or [{"name": process["name"]}]:
                is_culprit = thread["name"] == service["culprit"]
                table.add_row(
                    name, thread["name"], pid, memory, *_doing(thread), style="bold red" if is_culprit else ""
                )
                name = pid = memory = ""
    return table if table.row_count else None


def _doing(thread: View) -> tuple[str, ...]:
    if "phase" not in thread:
        return ()
    pending = str(thread["pending"] or "")
    return phase_of(thread), seconds(thread["phase_s"]), pending, seconds(thread["pending_s"])


def _event(event: View) -> Text:
    return Text(f"{seconds(event['age_s']):>8} ago  {event['service']}: {event['writer']}: {event['text']}")
