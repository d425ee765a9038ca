"""Past the gateway: a sampling that no model can carry out is refused, and the engine goes on."""

from __future__ import annotations

import math
from collections.abc import Iterator

import grpc
import pytest
from stack_double import KEY, RunningStack

from sluice_protocol.v1 import engine_pb2, engine_pb2_grpc
from sluice_runtime.rpc.options import KEY_HEADER

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]
METADATA = ((KEY_HEADER, KEY),)
GOOD = {"top_p": 1.0, "repetition_penalty": 1.0, "max_tokens": 4}
BAD = [
    ("repetition_penalty", 0.0),  # what a caller says who leaves it out
    ("repetition_penalty", 1e-40),
    ("repetition_penalty", math.nan),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", -1.0),
    ("top_p", 0.0),
    ("min_p", math.nan),
    ("presence_penalty", math.inf),
    ("frequency_penalty", math.nan),
    ("logit_bias", {2**31: 1.0}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: math.inf}),
    ("top_k", 2**32 - 1),
    ("top_logprobs", 2**32 - 1),
    ("max_tokens", 2**32 - 1),
]


@pytest.fixture(scope="module")
def stack() -> Iterator[RunningStack]:
    with RunningStack() as running:
        running.start("unified", "prefill", "decode")
        yield running


def generate(stack: RunningStack, name: str, **sampling: object) -> engine_pb2.GenerateReply:
    """What one request is answered."""
    with grpc.insecure_channel(stack.engines[name].address) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        attach = stub.Attach(engine_pb2.AttachRequest(gateway_id="test"), metadata=METADATA)
        next(attach)
        request = engine_pb2.GenerateRequest(
            request_id="r",
            gateway_id="test",
            prompt_ids=[1, 2, 3],
            sampling=engine_pb2.Sampling(**(GOOD | sampling)),  # type: ignore[arg-type]
            source_address=stack.engines["prefill-0"].ready["source_address"],
        )
        reply = stub.Generate(request, metadata=METADATA, timeout=30)
        attach.cancel()
    return reply


@pytest.mark.parametrize("name", ["unified-0", "decode-0"])
def test_each_is_refused_by_name_and_the_next_request_is_served(stack, name):
    for field, value in BAD:
        refused = generate(stack, name, **{field: value}).refused
        assert (refused.reason, refused.retry_after_ms) == ("BadSampling", 0), (field, value)
        assert refused.detail.startswith(field), refused.detail
    ended = generate(stack, name).ended
    assert (ended.reason, ended.num_tokens) == ("length", 4)
    for engine in stack.engines.values():
        assert engine.process.popen.poll() is None
        engine.settled()
