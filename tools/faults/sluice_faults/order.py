"""An order: what happens at one hook point, as a small JSON file `<point>.json`. Both ends of it are here.

A process that carries an order out says so in `<point>.reached`, with its pid and thread: whoever placed the order
waits for that file instead of guessing.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any


class OrderError(Exception):
    """A file that is no order; the message says which and why."""


class Action(StrEnum):
    PASS = "pass"  # nothing but the word that it was reached
    BLOCK = "block"  # waits for a lock that nobody gives back while the order lies there
    SPIN = "spin"  # computes in Python while the order lies there: others get their turns of the interpreter
    SPIN_GIL = "spin-gil"  # computes in C and never gives the interpreter back, for `seconds`
    SLEEP = "sleep"  # `seconds`, however soon the order goes
    RAISE = "raise"  # the builtin exception `error`, with `errno` where that is set
    END = "end"  # SystemExit: what no `except Exception` stops
    EXHAUST = "exhaust"  # the address space ends `mib` above what it is; then all of it is asked for
    FREEZE_RPC = "freeze-rpc"  # gRPC's threads of this process stand still from now on
    HOLD = "hold"  # `holds` says yes, `holds_one` of the first that comes by
    FLIP = "flip"  # `change` flips the lowest bit of the byte at `offset` (from the end where that is negative)
    DROP = "drop"  # `change` gives nothing back
    REPEAT = "repeat"  # `change` gives back what went by last, instead


@dataclass(frozen=True, slots=True)
class Order:
    """`after`: so often the point is reached first without effect. `times`: so often it acts, 0 is always; a block and
    its kin last for one time. `pid`: of this process only, 0 is any."""

    action: Action
    after: int = 0
    times: int = 0
    pid: int = 0
    seconds: float = 60.0
    error: str = "RuntimeError"
    errno: int = 0
    text: str = "injected"
    offset: int = -1
    mib: int = 64


def path_of(directory: Path, point: str) -> Path:
    return directory / f"{point}.json"


def parse(data: bytes, where: str) -> Order:
    """Raises OrderError."""
    try:
        fields: dict[str, Any] = json.loads(data)
        return Order(Action(fields.pop("action")), **fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise OrderError(f"{where}: {error!r}; an order is a JSON object with action and fields of Order") from error


def place(directory: Path, point: str, order: Order) -> None:
    """In force as soon as this returns: the file appears whole. An older word that it was reached is forgotten."""
    _reached(directory, point).unlink(missing_ok=True)
    fresh = directory / f".{point}.{os.getpid()}"
    fresh.write_text(json.dumps(asdict(order)))
    fresh.replace(path_of(directory, point))


def withdraw(directory: Path, point: str) -> None:
    path_of(directory, point).unlink(missing_ok=True)


def reached(directory: Path, point: str) -> dict[str, int] | None:
    """pid and tid of who carried the order out; None as long as nobody has."""
    try:
        told: dict[str, int] = json.loads(_reached(directory, point).read_bytes())
    except FileNotFoundError:
        return None
    return told


def acknowledge(directory: Path, point: str, tid: int) -> None:
    fresh = directory / f".{point}.{os.getpid()}.{tid}"
    fresh.write_text(json.dumps({"pid": os.getpid(), "tid": tid}))
    fresh.replace(_reached(directory, point))


def _reached(directory: Path, point: str) -> Path:
    return directory / f"{point}.reached"
