"""The handoff with real processes: over NIXL and over the byte stream, with the scripted and the trained model."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from stack_double import KEY, ChatStream, RunningStack

from sluice_protocol.codec import encode_sampling
from sluice_protocol.sampling import Sampling
from sluice_protocol.v1 import engine_pb2, engine_pb2_grpc
from sluice_runtime.rpc.options import KEY_HEADER

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

MODEL = Path(__file__).parents[2] / "models" / "recall-1m"


@pytest.mark.parametrize("transport", ["nixl", "stream"])
@pytest.mark.parametrize("verify", ["full", "sample"])
def test_texts_are_equal_over_every_transport(transport, verify):
    prompts = [f"story {i} " * (3 + 9 * i) for i in range(6)]
    with RunningStack() as unified:
        unified.start("unified")
        unified.start_gateway()
        expected = [unified.chat(prompt, 10).text() for prompt in prompts]
    with RunningStack(spec={"transport": transport, "verify": verify}) as stack:
        stack.start("prefill", "decode")
        stack.start_gateway()
        with ThreadPoolExecutor(len(prompts)) as pool:
            streams = [stack.chat(prompt, 10) for prompt in prompts]
            assert list(pool.map(ChatStream.text, streams)) == expected
        assert {stream.route["transport"] for stream in streams} == {transport}
        assert all(stream.route["records"] > 1 for stream in streams)
        again = stack.chat(prompts[-1], 10)
        assert again.text() == expected[-1]
        assert again.usage["prompt_tokens_details"]["cached_tokens"] > 0
        for engine in stack.engines.values():
            engine.settled()


def generate(stack: RunningStack, **sampling: object) -> engine_pb2.Ended:
    """One request past the gateway: 50 tokens in, 60 of chunks of 16."""
    metadata = ((KEY_HEADER, KEY),)
    prefill, decode = stack.engines["prefill-0"], stack.engines["decode-0"]
    with grpc.insecure_channel(decode.address) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        attach = stub.Attach(engine_pb2.AttachRequest(gateway_id="test"), metadata=metadata)
        next(attach)
        request = engine_pb2.GenerateRequest(
            request_id="r",
            gateway_id="test",
            prompt_ids=list(range(50)),
            sampling=encode_sampling(Sampling(**sampling)),
            source_address=prefill.ready["source_address"],
        )
        reply = stub.Generate(request, metadata=metadata, timeout=60)
        attach.cancel()
    return reply.ended


def test_no_read_after_a_first_token_that_ends_the_request():
    with RunningStack(spec={"chunk_tokens": 16}) as stack:
        stack.start("prefill", "decode")
        single = generate(stack, max_tokens=1)
        assert (single.reason, single.num_tokens, single.route.records) == ("length", 1, 0)
        books = stack.engines["decode-0"].settled()
        assert books["cached"]["pages"] == 0  # nothing was committed
        stopped = generate(stack, max_tokens=9, stop_token_ids=tuple(range(512)))
        assert (stopped.reason, stopped.num_tokens) == ("stop", 1)
        assert stack.engines["decode-0"].settled()["cached"]["pages"] == 0
        longer = generate(stack, max_tokens=9)
        assert (longer.reason, longer.num_tokens) == ("length", 9)
        assert stack.engines["decode-0"].settled()["cached"]["pages"] == 3
        stack.engines["prefill-0"].settled()


def test_the_trained_model_hands_over_and_answers_exactly():
    rows = [json.loads(line) for line in (MODEL / "heldout.jsonl").read_text().splitlines()][::20]
    with RunningStack(model=str(MODEL)) as stack:
        zygote = stack.spawn_zygote()
        try:
            stack.start("prefill", "decode")
            stack.start_gateway()
            with ThreadPoolExecutor(len(rows)) as pool:
                streams = [ChatStream(stack.connect(), row["messages"], 64, {}) for row in rows]
                answers = list(pool.map(ChatStream.text, streams))
            assert answers == [row["answer"] for row in rows]
            assert all(stream.finish == "stop" and stream.route["transport"] == "nixl" for stream in streams)
            for engine in stack.engines.values():
                engine.settled()
            for engine in stack.engines.values():
                engine.process.end()
        finally:
            zygote.end()
