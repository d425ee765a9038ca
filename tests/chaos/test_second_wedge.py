"""The second original wedge: one dead thread behind a green /health.

In the stack that this one replaces, a mass abort made the decode side send the prefill side a message of a kind that
the prefill side did not know. One thread read that socket. It asserted that it knew the kind, and died of it. Nobody
watched that thread: its process lived on, `/health` stayed 200, and every later request hung in the handshake that only
that thread could answer, for as long as it took somebody to notice.

Here the same storm comes twice: over the product, where nothing happens, and over a double that has the original
fault, where the verdict names the thread within seconds.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest
from stack_double import KEY, EngineProcess, RunningStack

from sluice_launch.process import eventually
from sluice_protocol.v1 import source_pb2, source_pb2_grpc
from sluice_runtime.health.reading import Copy
from sluice_runtime.rpc.options import KEY_HEADER

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]
METADATA = ((KEY_HEADER, KEY),)
SESSIONS, UNKNOWN = 24, 4
LONG = "a long story " * 60
DOUBLE = Path(__file__).resolve().parents[1] / "support" / "original_fault.py"


class OriginalStack(RunningStack):
    """Its prefill engine has the original fault."""

    def _program(self, role: str) -> tuple[str, ...]:
        return (str(DOUBLE), "supervise") if role == "prefill" else ()


@pytest.fixture
def stack() -> Iterator[RunningStack]:
    with RunningStack(scripted={"token_cost_us": 300.0}, spec={"max_running": 16, "chunk_tokens": 64}) as running:
        running.start("prefill", "decode")
        running.start_gateway()
        yield running


def mass_abort(stack: RunningStack, prefill: EngineProcess) -> float:
    """Streams in every phase go away at once, and among it the source hears what it does not know: then."""
    streams = [stack.chat(f"{i} {LONG if i % 2 else 'talk'}", max_tokens=2000) for i in range(SESSIONS)]
    eventually(lambda: sum(prefill.inspect()["sequences"].values()) > 2, "the storm has gathered")
    with grpc.insecure_channel(prefill.ready["source_address"]) as channel:
        stub = source_pb2_grpc.SourceStub(channel)
        said_at = time.monotonic()
        calls = [stub.Lease(iter([source_pb2.ReaderMessage()]), metadata=METADATA, timeout=20) for _ in range(UNKNOWN)]
        for stream in streams:
            stream.drop()
        for call in calls:
            with contextlib.suppress(grpc.RpcError):
                list(call)
    return said_at


def ask(url: str, path: str) -> tuple[int, Any]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = HTTPConnection(parts.hostname, parts.port, timeout=5)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def probes_of(engine: EngineProcess) -> str:
    return str(next(event["probes"] for event in engine.process.events if event.get("event") == "supervising"))


def lease_ticks(engine: EngineProcess) -> int:
    rows = ask(probes_of(engine), "/status")[1]["rows"]
    return int(next(row["ticks"] for row in rows if row["name"] == "leader.lease"))


def test_a_mass_abort_with_an_unknown_message_changes_nothing(stack):
    prefill = stack.engines["prefill-0"]
    before = int(prefill.inspect()["counters"].get("unknown_messages", 0))
    mass_abort(stack, prefill)
    assert len(stack.chat("are you well?", max_tokens=5).text()) == 5
    ticks = lease_ticks(prefill)
    eventually(lambda: lease_ticks(prefill) > ticks + 1, "the lease thread turns")
    for engine in stack.engines.values():
        engine.settled()
        assert ask(probes_of(engine), "/livez")[0] == 200
        assert not [event for event in engine.process.events if event.get("event") == "incident"]
    assert int(prefill.inspect()["counters"]["unknown_messages"]) == before + UNKNOWN


def test_the_original_fault_is_named_within_seconds():
    spec = {"max_running": 16, "chunk_tokens": 64, "health": {"quarantine_s": 0}}
    with OriginalStack(scripted={"token_cost_us": 300.0}, spec=spec) as stack:
        prefill, _ = stack.start("prefill", "decode")
        stack.start_gateway()
        said_at = mass_abort(stack, prefill)
        incident = prefill.process.wait_for("incident")
        assert time.monotonic() - said_at < 5.0
        assert (incident["verdict"], incident["reason"]) == ("dead", "LeaseThreadDead")
        assert incident["culprit"] == "leader.lease"
        evidence = prefill.process.wait_for("evidence")
        bundle = Path(evidence["path"])
        rows = Copy((bundle / "recorder.bin").read_bytes()).rows()
        assert rows["leader.loop"].state.name == rows["leader.lease"].state.name == "RUNNING"  # so they had said
        assert "Thread 0x" in (bundle / "leader.stacks").read_text()
        assert KEY not in (bundle / "about.json").read_text()
        assert prefill.process.popen.wait(30) == 1
        stack.forget("prefill-0")
