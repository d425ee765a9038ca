"""gRPC's own threads: a call is not handed from one to the other of them (docs/adr/0099)."""

from __future__ import annotations

import subprocess
import sys

from sluice_runtime.process.processes import child_environment

CALLS = 100
# A server and a client, and how often gRPC's event engine's threads were woken meanwhile.
PROGRAM = f"""
import asyncio, pathlib
import grpc, grpc.aio

async def answer(request, context):
    return b"x"

def wakes():
    told = [task.read_text() for task in pathlib.Path("/proc/self/task").glob("*/status")]
    lines = [line for text in told if "event_engine" in text.partition(chr(10))[0] for line in text.splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))

async def main():
    server = grpc.aio.server()
    handler = grpc.method_handlers_generic_handler("t.T", {{"A": grpc.unary_unary_rpc_method_handler(answer)}})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{{port}}") as channel:
        call = channel.unary_unary("/t.T/A")
        await call(b"a")
        before = wakes()
        for _ in range({CALLS}):
            await call(b"a")
        print(wakes() - before)
    await server.stop(None)

asyncio.run(main())
"""


def test_a_call_wakes_no_thread_of_the_event_engine() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert int(done.stdout) < CALLS
    assert "experiment" not in done.stderr.lower()  # this gRPC knows all of them


def test_who_has_set_experiments_keeps_his(monkeypatch) -> None:
    monkeypatch.setenv("GRPC_EXPERIMENTS", "event_engine_client")
    assert child_environment()["GRPC_EXPERIMENTS"] == "event_engine_client"
