"""What the services of a stack do and who is stuck, asked of their supervisors: also while all they watch is frozen."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from sluice_cli.http import GatewayError, get_json
from sluice_cli.notes import NONE_RUNS, read_stacks
from sluice_gateway.status.view import Told, stack_view
from sluice_runtime.probe_client import NoAnswer, ask_json

PERIOD_S, TIMEOUT_S = 1.0, 1.0


class StatusError(Exception):
    """There is nothing to show; the message says what to do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="", help="of a gateway that is asked; default: the `sluice up` that runs here")
    parser.add_argument("--api-key", default="", help="one of that gateway's --api-keys-file")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--watch", action="store_true", help="again every second, until Ctrl-C")


def run(args: argparse.Namespace) -> int:
    """1: nothing runs, or nobody answers for it."""
    if not args.json and importlib.util.find_spec("rich") is None:
        print("sluice status: the table needs rich: pip install 'sluice-serve[cli]', or give --json", file=sys.stderr)
        return 1
    look = partial(from_gateway, args.url, args.api_key) if args.url else from_supervisors
    try:
        view = look()
        if view.get("others"):
            print(f"beside it: {', '.join(view['others'])} (--url asks one of them)", file=sys.stderr)
        if args.json:
            return _print_json(view, look if args.watch else None)
        from sluice_cli.status_table import show, watch

        if args.watch:
            watch(view, look, PERIOD_S)
        else:
            show(view)
    except (StatusError, GatewayError) as error:
        print(f"sluice status: {error}", file=sys.stderr)
        return 1
    return 0


def _print_json(view: Mapping[str, Any], look: Callable[[], dict[str, Any]] | None) -> int:
    """One document, or one a line for ever."""
    print(json.dumps(view, indent=None if look else 1), flush=True)
    while look is not None:
        time.sleep(PERIOD_S)
        print(json.dumps(look()), flush=True)
    return 0


def from_gateway(url: str, api_key: str) -> dict[str, Any]:
    """Its own view. Raises StatusError, GatewayError."""
    try:
        status, body = get_json(url, "/status/now", api_key=api_key)
    except (OSError, ValueError) as error:
        raise StatusError(f"{url} does not answer: {error}; ask the supervisors with `sluice status` there") from error
    if status != 200 or not isinstance(body, dict) or "services" not in body:
        refusal = body.get("error") if isinstance(body, dict) else None
        told = refusal["message"] if isinstance(refusal, dict) else "no gateway of Sluice answers there"
        raise StatusError(f"{url}: {told}")
    return body


def from_supervisors() -> dict[str, Any]:
    """Of the `sluice up` that runs here, and the URLs of others beside it. Raises StatusError when none does, or none
    of its services has said where its supervisor answers."""
    stacks = read_stacks()
    if not stacks:
        raise StatusError(f"{NONE_RUNS}. Start one with `sluice up`, or give --url of a gateway.")
    note = stacks[0]
    if not note["services"]:
        raise StatusError(f"the `sluice up` with pid {note['pid']} has not started its services yet")
    told = asyncio.run(_ask_all(note["services"]))
    view = stack_view(told)
    gateway = next((one.status for one in told if one.role == "gateway" and one.status), None)
    others = [other["url"] for other in stacks[1:]]
    return {
        "url": note["url"],
        "model": note["model"],
        "gateway": (gateway or {}).get("gateway"),
        **view,
        "others": others,
    }


async def _ask_all(services: list[dict[str, Any]]) -> list[Told]:
    return list(await asyncio.gather(*(_ask(service) for service in services)))


async def _ask(service: Mapping[str, Any]) -> Told:
    name, role, url = str(service["name"]), str(service.get("role", "")), str(service["probes"])
    try:
        return Told(name, role, url, await ask_json(url, "/status", TIMEOUT_S))
    except NoAnswer as error:
        return Told(name, role, url, trouble=f"its supervisor (pid {service.get('pid')}) does not answer: {error}")
