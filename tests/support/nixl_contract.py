"""Run the contract suite over NIXL: this process owns the reader's agent, the source is a sidecar of its own.

    python nixl_contract.py LANES FOLDER       prints one JSON object: check -> "ok" or a traceback

A program of its own because a process with an agent must not fork, and pytest's may.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

from sidecar_double import FINGERPRINT, Memory, Sidecar
from transfer_contract import CHECKS
from transfer_double import KEY, fill

from sluice_engine.pool import map_pools
from sluice_engine.transfer.messages import FrameReader, SidecarHello, decode_report
from sluice_engine.transfer.nixl import NixlSettings, NixlTransfer, load_nixl
from sluice_engine.transfer.spec import SidecarRole
from sluice_protocol.source import SourceHello


class NixlRig:
    """The reader's pools are fresh, the agent is the process's one."""

    def __init__(self, transfer: NixlTransfer, memory: Memory, folder: Path, lanes: str, number: int) -> None:
        self.transfer, self.reader = transfer, memory.pools
        self.memory = Memory()
        fill(self.memory.pools)
        self.source = self.memory.pools
        self.sidecar = Sidecar(folder, self.memory, f"source.{number}", lanes=lanes, role=SidecarRole.SOURCE)
        self.peer = self._hello()
        transfer.attach(self.peer)

    def _hello(self) -> SourceHello:
        frames, bodies = FrameReader(), list[bytes]()
        limit = time.monotonic() + 60
        while not self.sidecar.socket.exists():
            assert time.monotonic() < limit
            time.sleep(0.01)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.sidecar.socket))
            while not bodies:
                bodies = frames.feed(connection.recv(1 << 16))
        told = decode_report(bodies[0])
        assert isinstance(told, SidecarHello)
        return told.source_hello(FINGERPRINT)

    def pump(self) -> None:
        time.sleep(100e-6)

    def hold(self) -> None:
        self.sidecar.signal(signal.SIGSTOP)

    def let_go(self) -> None:
        self.sidecar.signal(signal.SIGCONT)

    def kill_source(self) -> None:
        self.sidecar.kill()

    def close(self) -> None:
        self.sidecar.kill()
        self.transfer.detach(self.peer.incarnation)
        self.memory.close()
        self.sidecar.socket.unlink(missing_ok=True)


def main(lanes: str, folder: Path) -> None:
    ours = Memory()
    nixl = load_nixl(NixlSettings(lanes, one_host=True))
    transfer = NixlTransfer(nixl, f"contract-{os.getpid()}", KEY, map_pools(ours.fd, ours.layouts, ours.plan), None)
    results = {}
    for number, (name, check) in enumerate(CHECKS.items()):
        rig = NixlRig(transfer, ours, folder, lanes, number)
        try:
            check(rig)
            results[name] = "ok"
        except BaseException:
            results[name] = traceback.format_exc()
        finally:
            rig.close()
    print(json.dumps(results), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
