"""A peer that holds a source's metadata and tries to WRITE with it.

python hostile_writer.py LANES HELLO_FILE      prints one JSON object: attempt -> what came of it
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
from transfer_double import KEY

from sluice_engine.transfer.nixl import NixlSettings, create_agent, load_nixl
from sluice_engine.transfer.seal import open_seal
from sluice_protocol.source import SourceHello

NBYTES = 4096


def attempt(agent: object, peer: str, ours: int, theirs: int) -> str:
    try:
        handle = agent.initialize_xfer(  # type: ignore[attr-defined]
            "WRITE",
            agent.get_xfer_descs([(ours, NBYTES, 0)], "DRAM"),  # type: ignore[attr-defined]
            agent.get_xfer_descs([(theirs, NBYTES, 0)], "DRAM"),  # type: ignore[attr-defined]
            peer,
        )
        state = agent.transfer(handle)  # type: ignore[attr-defined]
        limit = time.monotonic() + 3
        while state == "PROC" and time.monotonic() < limit:
            state = agent.check_xfer_state(handle)  # type: ignore[attr-defined]
    except Exception as error:
        return type(error).__name__
    return str(state)


def main(lanes: str, path: Path) -> None:
    hello = msgspec.msgpack.decode(path.read_bytes(), type=SourceHello)
    agent = create_agent(load_nixl(NixlSettings(lanes, one_host=True)), f"hostile-{os.getpid()}")
    bytes_of_evil = np.full(NBYTES, 0x66, dtype=np.uint8)
    agent.register_memory([(int(bytes_of_evil.ctypes.data), NBYTES, 0, "")], "DRAM")
    peer = agent.add_remote_agent(open_seal(hello, KEY)).decode()
    base = hello.pools[0].base
    size = hello.pools[0].stride * hello.pools[0].num_records
    evil = int(bytes_of_evil.ctypes.data)
    results = {
        # Memory that the metadata does not name, where a writable mapping might lie.
        "beyond": attempt(agent, peer, evil, base + (size + 0x200000)),
        "named": attempt(agent, peer, evil, base),
    }
    print(json.dumps(results), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
