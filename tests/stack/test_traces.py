"""One trace over gateway, decode and prefill, sent to a collector of our own; and log lines that carry the same ids."""

from __future__ import annotations

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from stack_double import RunningStack

from sluice_launch.process import eventually

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector:
    """OTLP over HTTP, as a collector takes it: span name -> (service, span)."""

    def __init__(self) -> None:
        self.spans: dict[str, tuple[str, Any]] = {}
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                owner.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            about = {entry.key: entry.value.string_value for entry in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans[span.name] = (about["service.name"], span)

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return {
        entry.key: getattr(entry.value, entry.value.WhichOneof("value"))  # type: ignore[call-overload]
        for entry in span.attributes
    }


def chat(stack: RunningStack, headers: dict[str, str]) -> tuple[str, int]:
    """(request id, status)."""
    connection = stack.connect()
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"} | headers)
    response = connection.getresponse()
    request_id = json.loads(response.read())["id"]
    connection.close()
    return request_id, response.status


def test_the_span_of_each_process_is_the_child_of_the_one_that_asked_it() -> None:
    with Collector() as collector, RunningStack(spec={"otlp": collector.url}) as stack:
        stack.start("prefill", "decode")
        stack.start_gateway("--otlp", collector.url)
        request_id, status = chat(stack, {"traceparent": CLIENT})
        assert status == 200
        names = {"gateway request", "try", "decode generate", "prefill lease"}
        eventually(lambda: names <= set(collector.spans), "all spans came")
        root, attempt, decode, prefill = (
            collector.spans[name] for name in ("gateway request", "try", "decode generate", "prefill lease")
        )
        assert [service for service, _ in (root, attempt, decode, prefill)] == [
            "gateway",
            "gateway",
            "decode",
            "prefill",
        ]
        assert {span.trace_id.hex() for _, span in (root, attempt, decode, prefill)} == {CLIENT.split("-")[1]}
        assert root[1].parent_span_id.hex() == CLIENT.split("-")[2]
        assert attempt[1].parent_span_id == root[1].span_id
        assert decode[1].parent_span_id == attempt[1].span_id
        assert prefill[1].parent_span_id == decode[1].span_id
        assert attributes(prefill[1])["request"] == attributes(decode[1])["request"] == f"{request_id}-0"
        told = [event.name for event in decode[1].events]
        assert told == ["room opened", "first token", "room committed"]


def test_a_collector_that_is_not_there_costs_no_request() -> None:
    with RunningStack(spec={"otlp": "http://127.0.0.1:9/v1/traces"}) as stack:
        stack.start("prefill", "decode")
        stack.start_gateway("--otlp", "http://127.0.0.1:9/v1/traces")
        assert [chat(stack, {})[1] for _ in range(20)] == [200] * 20
        for engine in stack.engines.values():
            engine.settled()


TOLD = (
    ("gateway", "request queued"),
    ("gateway", "request ended"),
    ("decode-0", "room opened"),
    ("decode-0", "room committed"),
    ("prefill-0", "lease admitted"),
    ("prefill-0", "lease ended"),
)


def test_request_and_lease_lead_from_one_log_to_the_next(capfd) -> None:
    lines: list[dict[str, Any]] = []

    def told_of(request: str) -> list[tuple[str, str]]:
        """(service, event) of every line about `request` so far; the services write each at its own time."""
        lines.extend(json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{"))
        return [(line["service"], line["event"]) for line in lines if line.get("request") == request]

    with RunningStack(spec={"log": "json"}) as stack:
        stack.start("prefill", "decode")
        stack.start_gateway("--log", "json")
        request_id, _ = chat(stack, {})
        mine = f"{request_id}-0"
        eventually(lambda: set(TOLD) <= set(told_of(mine)), "all services have told of it")
    events = told_of(mine)
    assert {service for service, _ in events} == {"gateway", "decode-0", "prefill-0"}
    assert len({line["lease"] for line in lines if line.get("request") == mine and "lease" in line}) == 1
    assert [event for event in TOLD if events.count(event) != 1] == [], events
