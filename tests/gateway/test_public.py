"""What the gateway says to everybody: health, version, models, and the names that clients give."""

from __future__ import annotations

import asyncio
import io
from importlib.metadata import version
from typing import Any

import pytest

from sluice_gateway.openai.client_names import MAX_NAME, ClientNames
from sluice_protocol.service_spec import LogFormat
from sluice_runtime import log


async def test_health_is_503_when_nothing_can_be_served(start: Any) -> None:
    """200 with `"ready": false` in it misled every load balancer."""
    stack = await start()
    assert (await stack.http.get("/health")).status_code == 200
    stack["d1"].quarantined = True
    await stack.until(lambda: bool(stack.gateway.not_ready()))
    sick = await stack.http.get("/health")
    assert (sick.status_code, sick.json()["ready"]) == (503, False)
    assert sick.json()["reason"]


async def test_addresses_and_pids_are_for_those_with_a_key(start: Any) -> None:
    stack = await start(api_keys=("k",))
    told = (await stack.http.get("/health", headers={"authorization": "Bearer k"})).json()
    assert {engine["address"] for engine in told["engines"]} == {"p1", "d1"}
    assert {engine["pid"] for engine in told["engines"]} == {11, 21}
    for headers in ({}, {"authorization": "Bearer wrong"}):
        answer = await stack.http.get("/health", headers=headers)
        assert answer.status_code == 200
        public = answer.json()
        assert public["engines"] == [{"role": "prefill", "trouble": ""}, {"role": "decode", "trouble": ""}]
        assert (public["ready"], public["model"]) == (True, "m")
        assert "requests" in public["counters"]


async def test_without_keys_they_are_for_this_machine_and_not_for_who_comes_by_a_proxy(start: Any) -> None:
    stack = await start()
    assert "address" in (await stack.http.get("/health")).json()["engines"][0]
    for header in ("x-forwarded-for", "forwarded", "via", "x-real-ip"):
        answer = await stack.http.get("/health", headers={header: "203.0.113.7"})
        assert "address" not in answer.json()["engines"][0]


async def test_a_reason_has_no_address_for_others(start: Any) -> None:
    stack = await start(engines={}, wait=False, api_keys=("k",))
    told = await stack.http.get("/health")
    assert (told.status_code, told.json()["reason"]) == (503, "no usable pair of engines")


async def test_the_version_is_told(start: Any) -> None:
    stack = await start(api_keys=("k",))
    assert (await stack.http.get("/version")).json() == {"version": version("sluice-serve")}


async def test_a_model_says_how_long_its_context_is(start: Any) -> None:
    stack = await start()
    [model] = (await stack.http.get("/v1/models")).json()["data"]
    assert (model["max_model_len"], model["context_length"]) == (4096, 4096)
    assert (await stack.http.get("/v1/models/m")).json() == model


async def test_before_an_engine_has_said_it_the_context_is_not_known(start: Any) -> None:
    stack = await start(engines={}, wait=False)
    [model] = (await stack.http.get("/v1/models")).json()["data"]
    assert (model["max_model_len"], model["context_length"]) == (None, None)


async def test_chunks_have_no_place_in_http_1_0(start: Any) -> None:
    """A proxy that takes the message for one without a body would take what follows for the next request."""
    stack = await start()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(stack.url.rsplit(":", 1)[1]))
    head = b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    writer.write(head + b"2\r\n{}\r\n0\r\n\r\n")
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"invalid_http" in answer
    assert b"Transfer-Encoding" in answer


@pytest.mark.parametrize("header", ["x-request-id", "X-Client-Request-Id"])
async def test_a_clients_name_for_its_request_is_bounded_and_escaped_in_the_log(start: Any, header: str) -> None:
    stack, said = await start(), io.StringIO()
    log.configure(LogFormat.HUMAN, "gateway", said)
    try:
        name = "a b\t" + "x" * 1000
        body = {"model": "m", "prompt": "x", "max_tokens": 1}
        answer = await stack.http.post("/v1/completions", json=body, headers={header: name})
    finally:
        log.configure(LogFormat.OFF, "gateway")
    assert answer.status_code == 200
    [line] = [line for line in said.getvalue().splitlines() if "request queued" in line]
    assert f'client_request="a b?{"x" * (MAX_NAME - 4)}"' in line


def test_what_is_no_traceparent_goes_no_further() -> None:
    fine = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    assert ClientNames.of({"traceparent": fine}).trace_parent == fine
    for wrong in (fine + "\n", "x" * 10_000, fine.upper(), ""):
        assert ClientNames.of({"traceparent": wrong}).trace_parent == ""
