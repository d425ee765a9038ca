"""Engines and gateways that only exist in the API: what they would answer, from what their pods' statuses say.

An engine that is ready is idle and routed to; one that was told to drain is empty at once. Nothing is dialled, but with
--dial FILE: then the real client calls the fakes of `fake_fleet`, at the addresses that the file says.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import faulthandler
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path

from sluice_operator import __main__ as operator_main
from sluice_operator.decide import plan as operator_plan
from sluice_operator.decide.observed import EngineReport, GatewayReport, Load
from sluice_operator.keys.rotation import Lives
from sluice_operator.live import template_check
from sluice_operator.live.apply import Applier
from sluice_operator.live.fleet import Heard
from sluice_operator.live.fleet_client import LiveFleet, plaintext
from sluice_operator.names import ENGINE_ROLES, PodRole
from sluice_operator.render.revision import StandardRenderer

PAGES = 1000


class KwokFleet:
    """`world`: a file with what every gateway says of its queue, {"queued": 3, "queue_age_ms": 900}. `drained`: one
    with the names of pods that were told to drain, for engines remember that when the operator does not."""

    def __init__(self, world, drained):
        self._world, self._drained = world, drained
        self._draining = set(drained.read_text().split()) if drained.exists() else set()

    async def look(self, contact, pods):
        pods = list(pods)
        loads = {pod.name: self._load(pod) for pod in pods if pod.role in ENGINE_ROLES and pod.started}
        engines = tuple(
            EngineReport(pod.name, pod.role, pod.revision, self._load(pod))
            for pod in pods
            if pod.role in ENGINE_ROLES and pod.ready and not pod.terminating
        )
        ready = [pod for pod in pods if pod.role is PodRole.GATEWAY and pod.ready and not pod.terminating]
        queue = json.loads(self._world.read_text()) if self._world.exists() else {}
        return Heard(loads, tuple(GatewayReport(pod.name, time.time(), engines=engines, **queue) for pod in ready))

    async def drain(self, contact, pod):
        self._draining.add(pod.name)
        self._drained.write_text("\n".join(self._draining))

    async def close(self):
        pass

    def _load(self, pod):
        return Load(total_pages=PAGES, draining=pod.name in self._draining, empty=True)


def dialled(path):
    """Pods of the tests have addresses where nobody is; what is not in the file is dialled in vain."""

    def dial(address, port):
        told = json.loads(path.read_text()) if path.exists() else {}
        return told.get(f"{address}:{port}", "127.0.0.1:1")

    return dial


def die_after(actions):
    """SIGKILL itself as soon as so many actions have been carried out."""
    obey, left = Applier.obey, iter(range(actions - 1))

    async def obeyed(self, action):
        outcome = await obey(self, action)
        if next(left, None) is None:
            os._exit(9)
        return outcome

    Applier.obey = obeyed


class OtherDefaults(StandardRenderer):
    """Of an operator that renders engines otherwise than ours does: another default, a field that it alone knows."""

    def engine(self, name, spec, revision):
        told = copy.deepcopy(super().engine(name, spec, revision))
        for role in told.values():
            pod = role["template"]["spec"]
            pod["terminationGracePeriodSeconds"] += 30
            pod["containers"][0]["env"].append({"name": "FROM_ANOTHER_VERSION", "value": "1"})
        return told


def say_where(*_):
    """On SIGUSR1: where every thread is, and every task of ours."""
    faulthandler.dump_traceback(all_threads=True)
    for task in asyncio.all_tasks():
        if any("sluice_operator" in frame.f_code.co_filename for frame in task.get_stack()):
            task.print_stack(file=sys.stderr)


def run(arguments):
    """The exit status of an operator with these arguments, ours among them."""
    options = argparse.ArgumentParser(allow_abbrev=False)
    options.add_argument("--die-after", type=int)
    options.add_argument("--world", type=Path, default=Path("/nowhere"))
    options.add_argument("--dial", type=Path, help="written by FakeFleet: pod address -> loopback address")
    options.add_argument("--drained", type=Path, required=True)
    options.add_argument("--constant", action="append", default=[], help="MODULE.NAME=SECONDS, for waits of minutes")
    options.add_argument("--lives", help="of certificates, seconds: of a CA, of a leaf, and the wait between steps")
    options.add_argument("--other-defaults", action="store_true", help="an operator of another version")
    options.add_argument("--lenient", action="store_true", help="an operator that accepts fields that no pod has")
    own, rest = options.parse_known_args(arguments)
    for told in own.constant:
        set_constant(*told.split("="))
    if own.lives:
        operator_plan.LIVES = Lives(*map(float, own.lives.split(",")))
    if own.other_defaults:
        operator_main.StandardRenderer = OtherDefaults
    if own.lenient:
        template_check.STRICT = template_check.LENIENT
    if own.die_after is not None:
        die_after(own.die_after)
    signal.signal(signal.SIGUSR1, say_where)
    live = own.dial is not None
    return operator_main.main(
        rest, LiveFleet(plaintext, dialled(own.dial)) if live else KwokFleet(own.world, own.drained)
    )


def set_constant(path, seconds):
    """Of a module that has it already: a name that is no constant any more is an error."""
    module = importlib.import_module(f"sluice_operator.{path.rpartition('.')[0]}")
    name = path.rpartition(".")[2]
    assert isinstance(getattr(module, name), float), path
    setattr(module, name, float(seconds))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
