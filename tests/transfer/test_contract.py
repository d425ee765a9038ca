"""One contract, three transports."""

from __future__ import annotations

import json
import subprocess
import sys

import nixl_contract
import pytest
from sidecar_double import LANES
from transfer_contract import CHECKS, Rig
from transfer_double import fill, hello, new_pools, tiny_layouts

from sluice_engine.transfer.memory import Fault, MemoryFabric, MemoryTransfer
from sluice_engine.transfer.stream import StreamTransfer, read_ranges


class MemoryRig:
    def __init__(self) -> None:
        layouts, fabric = tiny_layouts(perturbed=True), MemoryFabric()
        self.source, self.reader = new_pools(layouts), new_pools(layouts)
        fill(self.source)
        self.fabric, self.transfer = fabric, MemoryTransfer(fabric, self.reader)
        self.peer = hello(self.source)
        fabric.serve(self.peer.incarnation, self.source)
        self.transfer.attach(self.peer)

    def pump(self) -> None:
        pass

    def hold(self) -> None:
        self.transfer.fault = lambda piece: Fault.HOLD

    def let_go(self) -> None:
        for handle in self.transfer.held():
            self.transfer.let_go(handle)

    def kill_source(self) -> None:
        self.fabric.kill(self.peer.incarnation)
        self.let_go()


class StreamRig:
    """The lease's stream is a loop over what was fetched; bytes come in messages of 100 bytes."""

    def __init__(self) -> None:
        layouts = tiny_layouts(perturbed=True)
        self.source, self.reader = new_pools(layouts), new_pools(layouts)
        fill(self.source)
        self.transfer = StreamTransfer(self.reader)
        self.peer = hello(self.source, transport="stream")
        self.transfer.attach(self.peer)
        self.held = self.dead = False

    def pump(self) -> None:
        if self.held:
            return
        for lease_id, fetch in self.transfer.take_fetches():
            if self.dead:
                self.transfer.end(lease_id)
                continue
            for data in read_ranges(self.source, fetch.records, lambda *_: 3, message_bytes=100):
                self.transfer.feed(lease_id, data)

    def hold(self) -> None:
        self.held = True

    def let_go(self) -> None:
        self.held = False

    def kill_source(self) -> None:
        self.held, self.dead = False, True


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("rig", [MemoryRig, StreamRig])
def test_in_process_transports_keep_the_contract(rig: type[Rig], check: str) -> None:
    CHECKS[check](rig())


@pytest.fixture(scope="module")
def nixl_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The whole suite in one process of its own: it owns an agent, so it is no place for pytest."""
    folder = tmp_path_factory.mktemp("nixl")
    program = [sys.executable, nixl_contract.__file__, LANES[1], str(folder)]
    done = subprocess.run(program, capture_output=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return dict(json.loads(done.stdout.decode().splitlines()[-1]))


@pytest.mark.process
@pytest.mark.timeout(110)
@pytest.mark.parametrize("check", CHECKS)
def test_nixl_keeps_the_contract_where_pieces_really_are_in_flight(nixl_results: dict[str, str], check: str) -> None:
    assert nixl_results[check] == "ok", nixl_results[check]
