"""Questions to an engine's leader from outside, over gRPC; and to supervisors, over HTTP."""

from __future__ import annotations

import json
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

import grpc

from sluice_protocol.v1 import engine_pb2, engine_pb2_grpc
from sluice_runtime.rpc.options import KEY_HEADER


class NoAnswer(Exception):
    """Nothing came back in time, or nothing that can be read."""


def inspect(address: str, key: str, timeout_s: float = 10.0) -> dict[str, Any]:
    """The leader's books. Raises NoAnswer."""
    with grpc.insecure_channel(address) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        try:
            reply = stub.Inspect(engine_pb2.InspectRequest(), metadata=((KEY_HEADER, key),), timeout=timeout_s)
        except grpc.RpcError as error:
            raise NoAnswer(f"{address}: Inspect: {error}") from error
    told: dict[str, Any] = json.loads(reply.json)
    return told


def ask_with_source(address: str, key: str, source: str, timeout_s: float = 20.0) -> str:
    """A prompt for a decode engine with its prefill engine at `source`: the reason of its end. Raises NoAnswer."""
    metadata = ((KEY_HEADER, key),)
    with grpc.insecure_channel(address) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        try:
            asked = engine_pb2.AttachRequest(gateway_id="harness")
            attach: Any = stub.Attach(asked, metadata=metadata, timeout=timeout_s)
            next(attach)
            request = engine_pb2.GenerateRequest(
                request_id="harness",
                gateway_id="harness",
                prompt_ids=[1, 2, 3, 4],
                sampling=engine_pb2.Sampling(max_tokens=4, top_p=1.0, repetition_penalty=1.0),
                source_address=source,
            )
            last = stub.Generate(request, metadata=metadata, timeout=timeout_s)
            attach.cancel()
        except grpc.RpcError as error:
            raise NoAnswer(f"{address}: Generate: {error}") from error
    return str(last.ended.error or last.ended.reason if last.HasField("ended") else last.refused.reason)


def get(url: str, path: str, timeout_s: float = 2.0) -> tuple[int, Any]:
    """(status, JSON value). Raises NoAnswer."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"null")
    except (OSError, HTTPException, ValueError) as error:
        raise NoAnswer(f"{url}{path}: {error!r}") from error
    finally:
        connection.close()
