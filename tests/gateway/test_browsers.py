"""Web pages from elsewhere: preflights, the headers that a browser needs, and who is let in."""

from __future__ import annotations

from typing import Any

import pytest

from sluice_gateway.__main__ import main
from sluice_gateway.http.origins import OriginError, check_origins, is_loopback

PAGE = "https://chat.example.com"
ASKED = "authorization,content-type,x-stainless-arch,x-stainless-runtime-version"


async def preflight(stack: Any, origin: str, path: str = "/v1/chat/completions") -> Any:
    headers = {"origin": origin, "access-control-request-method": "POST", "access-control-request-headers": ASKED}
    return await stack.http.options(path, headers=headers)


async def test_a_page_that_is_named_may_ask_and_read(start: Any) -> None:
    stack = await start(cors_origins=(PAGE,))
    allowed = await preflight(stack, PAGE)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == PAGE
    assert "POST" in allowed.headers["access-control-allow-methods"]
    assert allowed.headers["access-control-allow-headers"] == ASKED
    assert "Origin" in allowed.headers["vary"]
    answer = await stack.http.post(
        "/v1/completions", json={"model": "m", "prompt": "x", "max_tokens": 1}, headers={"origin": PAGE}
    )
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "Origin" in answer.headers["vary"]
    assert {"x-request-id", "retry-after", "x-should-retry"} <= set(
        answer.headers["access-control-expose-headers"].split(", ")
    )


async def test_streams_and_errors_carry_the_headers_too(start: Any) -> None:
    stack = await start(cors_origins=(PAGE,), api_keys=("k",))
    key = {"authorization": "Bearer k", "origin": PAGE}
    body = {"model": "m", "prompt": "x", "max_tokens": 1}
    answers = [
        await stack.http.post("/v1/completions", json=body, headers={"origin": PAGE}),
        await stack.http.post("/v1/completions", json=body | {"temperature": 9}, headers=key),
        await stack.http.post("/v1/completions", json=body | {"stream": True, "seed": 1}, headers=key),
        await stack.http.get("/nowhere", headers=key),
    ]
    stack.gateway.system_fingerprint = None  # a defect
    answers.append(await stack.http.post("/v1/completions", json=body, headers=key))
    assert [answer.status_code for answer in answers] == [401, 400, 200, 404, 500]
    assert {answer.headers["access-control-allow-origin"] for answer in answers} == {PAGE}


async def test_other_pages_are_not_let_in(start: Any) -> None:
    stack = await start(cors_origins=(PAGE,))
    refused = await preflight(stack, "https://evil.example.com")
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers
    answer = await stack.http.get("/v1/models", headers={"origin": "https://evil.example.com"})
    assert "access-control-allow-origin" not in answer.headers


async def test_without_the_option_there_is_none_of_it(start: Any) -> None:
    stack = await start()
    assert (await preflight(stack, PAGE)).status_code == 405
    answer = await stack.http.get("/v1/models", headers={"origin": PAGE})
    assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_every_page_may_ask_where_that_is_allowed(start: Any) -> None:
    stack = await start(cors_origins=("*",))
    assert (await preflight(stack, PAGE)).headers["access-control-allow-origin"] == "*"


def test_what_is_no_origin_is_refused_by_name() -> None:
    check_origins(["https://a.example", "http://localhost:3000", "tauri://localhost", "http://[::1]:1"], "0.0.0.0")
    check_origins(["*"], "127.0.0.1")
    for origin in ("example.com", "https://a.example/", "https://a.example/path", "https://", "null", "https://*.a"):
        with pytest.raises(OriginError, match="--cors-origin"):
            check_origins([origin], "127.0.0.1")
    for host in ("0.0.0.0", "*", "10.0.0.1", "::"):
        with pytest.raises(OriginError, match="loopback"):
            check_origins(["*"], host)


def test_the_gateway_does_not_start_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model-name", "m", "--tokenizer", "bytes", "--unified", "127.0.0.1:1"]
    assert main([*options, "--listen", "*:0", "--cors-origin", "*"]) == 2
    assert "loopback" in capsys.readouterr().err


def test_loopback_is_what_only_this_machine_reaches() -> None:
    hosts = ("127.0.0.1", "127.8.0.1", "::1", "localhost", "::ffff:127.0.0.1")
    assert all(map(is_loopback, hosts))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "*", "10.0.0.1", "example.com", "")))
