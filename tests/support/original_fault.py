"""A prefill engine with the original fault: its lease thread reads with an assertion, and its death is told to nobody.

    python original_fault.py supervise ARGUMENTS OF sluice_engine.supervisor.supervise
    python original_fault.py leader ARGUMENTS OF sluice_engine.leader.main

Everything else is the product: the supervisor above it, the recorder beside it, the leader's loop next to it.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc

from sluice_engine.leader import main
from sluice_engine.leader.lease import source_stream
from sluice_engine.leader.lease.thread import LeaseThread
from sluice_engine.supervisor import supervise
from sluice_runtime.health.layout import Phase
from sluice_runtime.process.children import Children


async def read_with_an_assertion(lease: Any) -> None:
    try:
        while (message := await lease._context.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
            assert message.WhichOneof("kind") is not None, "unknown message"
            await lease._hear(source_stream.decode_reader_message(message))
    except AssertionError:
        lease._thread._loop.stop()  # the thread's function returns, as it did there


def run_and_tell_nobody(thread: LeaseThread) -> None:
    thread._row.begin(Phase.SERVING)
    asyncio.set_event_loop(thread._loop)
    thread._loop.call_soon(thread._tick)
    thread._loop.run_forever()


def be_leader(argv: list[str]) -> None:
    source_stream.SourceLeaseStream._read = read_with_an_assertion  # type: ignore[method-assign]
    LeaseThread._run = run_and_tell_nobody  # type: ignore[method-assign]
    main.main(argv)


def be_supervisor(argv: list[str]) -> int:
    real = Children.start

    async def start_double(self: Children, name: str, *told: str, **more: Any) -> Any:
        if name == "leader":
            told = (__file__, "leader", *told[2:])
        return await real(self, name, *told, **more)

    Children.start = start_double  # type: ignore[method-assign]
    return supervise.main(argv)


if __name__ == "__main__":
    if sys.argv[1] == "leader":
        be_leader(sys.argv[2:])
    else:
        sys.exit(be_supervisor(sys.argv[2:]))
