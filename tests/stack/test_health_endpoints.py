"""Health of real processes as their neighbours see it: kubelet, gRPC clients, gateway."""

from __future__ import annotations

import json
import signal
from http.client import HTTPConnection

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from stack_double import EngineProcess, RunningStack, send_signal

from sluice_launch.process import eventually, stop_process

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def ask(port: int, path: str) -> tuple[int, dict]:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def probe(engine: EngineProcess, path: str) -> tuple[int, dict]:
    return ask(engine.ready["probes"], path)


def grpc_health(engine: EngineProcess) -> int | None:
    """None: no answer."""
    with grpc.insecure_channel(engine.address) as channel:
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            status: int = stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=2).status
            return status
        except grpc.RpcError:
            return None


def test_a_ready_engine_says_so_on_every_port_and_has_made_a_real_step() -> None:
    with RunningStack() as stack:
        (engine,) = stack.start("unified")
        for path in ("/livez", "/readyz", "/startupz", "/health"):
            assert probe(engine, path)[0] == 200, path
        assert probe(engine, "/readyz")[1]["canary"] == "unknown"
        eventually(lambda: grpc_health(engine) == SERVING, "gRPC health follows the readiness word")
        rows = {row["name"]: row for row in probe(engine, "/status")[1]["rows"]}
        assert rows["rank0.device"]["progress"] >= 2  # prefill and decode of the warm-up
        assert engine.settled()["cached"] == {"pages": 0, "snapshots": 0}


def test_a_stuck_leader_is_named_by_its_supervisor_and_silent_itself() -> None:
    with RunningStack(spec={"health": {"floor_s": 3.0, "quarantine_s": 0}}) as stack:
        (engine,) = stack.start("unified")
        eventually(lambda: grpc_health(engine) == SERVING, "serving")
        stop_process(engine.pid("leader"))
        assert grpc_health(engine) is None
        status, told = probe(engine, "/health")
        assert status == 200  # not yet: it has its budget
        assert told["verdict"] in ("idle", "progressing", "slow")  # somebody may be waiting to be accepted
        incident = engine.process.wait_for("incident")
        assert (incident["reason"], incident["culprit"]) == ("SchedulerFrozen", "leader.loop")
        assert engine.process.popen.wait(30) == 3
        assert stack.forget(engine.name) == 3


def test_readiness_goes_with_the_wish_to_stop_and_liveness_stays() -> None:
    with RunningStack(scripted={"step_cost_us": 20_000}) as stack:
        (engine,) = stack.start("unified")
        stack.start_gateway()
        stream = iter(stack.chat("a long story", 150))
        next(stream)
        send_signal(engine.supervisor, signal.SIGTERM)
        eventually(lambda: probe(engine, "/readyz")[0] == 503, "not ready while it drains")
        assert probe(engine, "/livez")[0] == 200
        eventually(lambda: grpc_health(engine) in (NOT_SERVING, None), "gRPC health follows")
        assert sum(1 for _ in stream) > 100  # what ran is finished
        assert stack.forget(engine.name) == 0
