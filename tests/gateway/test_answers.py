"""What a request asks for is in its answer."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from sluice_gateway.memory import Fault, MemoryEngine
from sluice_gateway.openai.frames import completion_logprobs
from sluice_gateway.text.deltas import Shown
from sluice_gateway.text.tokenizer import ByteTokenizer
from sluice_protocol.generate import Role
from sluice_protocol.sampling import BOUNDS, TokenLogprobs

EOS = 257


def model(text: str, **fields: Any) -> dict[str, MemoryEngine]:
    """One unified engine that says `text`, a byte per token and markers as tokens of their own, and then EOS."""
    data = ByteTokenizer().encode_raw(text)
    return {
        "u": MemoryEngine(Role.UNIFIED, lambda _p, position: data[position] if position < len(data) else EOS, **fields)
    }


def chunks(response: Any) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def content(parts: list[Any], index: int = 0, key: str = "content") -> str:
    deltas = [choice["delta"] for part in parts for choice in part["choices"] if choice["index"] == index]
    return "".join(delta.get(key, "") for delta in deltas)


async def both(stack: Any, **fields: Any) -> tuple[Any, list[Any]]:
    """The same chat whole and streamed; their texts and reasons must be equal."""
    fields = {"max_tokens": 60} | fields
    whole = (await stack.chat(**fields)).json()
    parts = chunks(await stack.chat(stream=True, **fields))
    for choice in whole["choices"]:
        assert content(parts, choice["index"]) == choice["message"]["content"]
        assert content(parts, choice["index"], "reasoning_content") == choice["message"].get("reasoning_content", "")
        reasons = [c["finish_reason"] for p in parts for c in p["choices"] if c["index"] == choice["index"]]
        assert [r for r in reasons if r] == [choice["finish_reason"]]
        assert reasons[-1]
    return whole, parts


async def test_eos_ends_an_answer_and_is_not_shown(start: Any) -> None:
    stack = await start(model("Hello"))
    whole, _ = await both(stack)
    assert whole["choices"][0]["message"]["content"] == "Hello"
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == 6
    assert stack["u"].requests[0].sampling.stop_token_ids == (EOS,)


async def test_eos_can_be_ignored_and_other_tokens_can_stop(start: Any) -> None:
    stack = await start(model("Hello"))
    whole, _ = await both(stack, ignore_eos=True, max_tokens=8)
    assert whole["choices"][0]["finish_reason"] == "length"
    whole, _ = await both(stack, stop_token_ids=[ord("l")])
    assert whole["choices"][0]["message"]["content"] == "He"


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        ("lo", "Hel", "stop"),
        (["xyz", " w"], "Hello", "stop"),
        (["world!", "rld"], "Hello wo", "stop"),
        ("Hello", "", "stop"),
        ("nope", "Hello world", "stop"),
        (["é", "d?"], "Hello world", "stop"),
        ([], "Hello world", "stop"),
    ],
)
async def test_the_answer_is_cut_before_the_stop_string(start: Any, stop: Any, text: str, reason: str) -> None:
    stack = await start(model("Hello world"))
    whole, _ = await both(stack, stop=stop)
    assert whole["choices"][0]["message"]["content"] == text
    assert whole["choices"][0]["finish_reason"] == reason
    await stack.idle()


async def test_a_stop_string_ends_the_work_on_the_engine(start: Any) -> None:
    stack = await start(model("ab" * 1000, max_context_tokens=1 << 16))
    whole = (await stack.chat(stop="ba", max_tokens=2000)).json()
    assert whole["choices"][0]["message"]["content"] == "a"
    assert stack["u"].cancelled == 1
    assert whole["usage"]["completion_tokens"] <= 10


async def test_what_no_engine_has_told_is_not_in_the_usage(start: Any) -> None:
    """After a stop string nobody tells how many tokens of the prompt were cached: that was given as 0."""
    stack = await start(model("Hello world"))
    whole, _ = await both(stack, stop="wor")
    assert whole["usage"]["completion_tokens"] == 9
    assert "prompt_tokens_details" not in whole["usage"]
    parts = chunks(await stack.chat(stop="wor", max_tokens=60, stream=True, stream_options={"include_usage": True}))
    assert "prompt_tokens_details" not in parts[-1]["usage"]
    whole, _ = await both(stack, stop="nope")
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_one_choice_that_was_told_is_enough_and_a_prompt_without_one_is_not(start: Any) -> None:
    """`stop` meets the answers to the prompt that ends with b; of the choices of a prompt any can tell."""

    def say(prompt: Any, position: int) -> int:
        return ord("x") if prompt[-1] == ord("b") and position == 2 else ord("o")

    stack = await start({"u": MemoryEngine(Role.UNIFIED, say)})
    mixed = (await stack.complete(prompt=["a", "b"], stop="x")).json()
    assert [choice["finish_reason"] for choice in mixed["choices"]] == ["length", "stop"]
    assert "prompt_tokens_details" not in mixed["usage"]
    told = (await stack.complete(prompt=["a", "aa"], stop="x", n=2)).json()
    assert told["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


async def test_held_back_text_comes_when_the_answer_ends_without_the_stop_string(start: Any) -> None:
    stack = await start(model("one STO"))
    whole, _ = await both(stack, stop="STOP")
    assert whole["choices"][0]["message"]["content"] == "one STO"


async def test_characters_of_many_tokens_come_whole_and_an_unfinished_one_is_dropped(start: Any) -> None:
    stack = await start(model("é😀漢"))
    whole, parts = await both(stack)
    assert whole["choices"][0]["message"]["content"] == "é😀漢"
    assert [p["choices"][0]["delta"].get("content") for p in parts[1:-1]] == ["é", "😀", "漢"]
    whole, _ = await both(stack, max_tokens=5)
    assert whole["choices"][0]["message"]["content"] == "é"


async def test_n_choices_are_n_tries_with_one_seed(start: Any) -> None:
    stack = await start(model("Hi"))
    whole, parts = await both(stack, n=3, stream_options=None)
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2]
    assert whole["usage"]["completion_tokens"] == 9
    assert sorted(r.sampling.choice for r in stack["u"].requests[:3]) == [0, 1, 2]
    assert len({r.sampling.seed for r in stack["u"].requests[:3]}) == 1
    assert {c["index"] for p in parts for c in p["choices"]} == {0, 1, 2}


async def test_a_seed_is_used_and_without_one_two_requests_differ(start: Any) -> None:
    stack = await start(model("Hi"))
    for seed in (5, 5, -1, None, None):
        await stack.chat(seed=seed)
    seeds = [r.sampling.seed for r in stack["u"].requests]
    assert seeds[:3] == [5, 5, 2**64 - 1]
    assert seeds[3] != seeds[4]


async def test_sampling_fields_reach_the_engine(start: Any) -> None:
    stack = await start(model("Hi"))
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.25, "repetition_penalty": 1.5}
    penalties = {"presence_penalty": 1, "frequency_penalty": -0.5}
    await stack.chat(**fields, **penalties, logit_bias={"5": 1, "3": -100}, max_tokens=None, max_completion_tokens=9)
    sampling = stack["u"].requests[0].sampling
    for name, value in (fields | penalties).items():
        assert getattr(sampling, name) == value
    assert sampling.logit_bias == ((3, -100.0), (5, 1.0))
    assert sampling.max_tokens == 9
    await stack.chat(max_tokens=None)
    sampling = stack["u"].requests[1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert sampling.max_tokens == 4096 - len(stack["u"].requests[1].prompt_ids)
    await stack.http.post("/v1/completions", json={"model": "m", "prompt": "x"})
    assert stack["u"].requests[2].sampling.max_tokens == 16


async def test_a_top_p_of_0_takes_the_best_token_only(start: Any) -> None:
    """That is the least top_p of an engine; see `test_top_k_top_p_and_min_p_keep_exactly_their_sets`."""
    stack = await start(model("Hi"))
    for value in (0, 0.0, 1e-300):
        assert (await stack.chat(top_p=value)).status_code == 200
    assert [request.sampling.top_p for request in stack["u"].requests] == [BOUNDS["top_p"].low] * 3


@pytest.mark.parametrize("top", [(), (98, 99)])
def test_the_sampled_token_is_always_among_a_completions_top_logprobs(top: tuple[int, ...]) -> None:
    sampled = Shown(97, TokenLogprobs(-3.0, top, (-0.1, -0.2)[: len(top)]), 0)
    told = completion_logprobs([sampled], ByteTokenizer())
    expected = {chr(token): logprob for token, logprob in zip(top, (-0.1, -0.2))} | {"a": -3.0}
    assert told["top_logprobs"] == [expected]


async def test_chat_logprobs(start: Any) -> None:
    stack = await start(model("Hé"))
    whole, parts = await both(stack, logprobs=True, top_logprobs=2)
    entries = whole["choices"][0]["logprobs"]["content"]
    assert [e["bytes"] for e in entries[:3]] == [[0x48], [0xC3], [0xA9]]
    assert [e["logprob"] for e in entries] == [-0.5] * 3
    assert [len(e["top_logprobs"]) for e in entries] == [2] * 3
    streamed = [p["choices"][0]["logprobs"] for p in parts if p["choices"][0].get("logprobs")]
    assert [e for block in streamed for e in block["content"]] == entries


async def test_logprobs_of_text_behind_a_stop_string_are_left_out(start: Any) -> None:
    stack = await start(model("one two"))
    whole, parts = await both(stack, logprobs=True, stop=" tw")
    entries = whole["choices"][0]["logprobs"]["content"]
    assert "".join(e["token"] for e in entries) == "one"
    streamed = [p["choices"][0]["logprobs"] for p in parts if p["choices"][0].get("logprobs")]
    assert [e for block in streamed for e in block["content"]] == entries


async def test_completion_logprobs(start: Any) -> None:
    stack = await start(model("Hé"))
    body = (await stack.complete(logprobs=1)).json()
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["H", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["text_offset"] == [0, 1, 1]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["top_logprobs"][0] == {"H": -0.5}
    assert (await stack.complete(logprobs=0)).json()["choices"][0]["logprobs"]["top_logprobs"] == [
        {"H": -0.5},
        {"bytes:\\xc3": -0.5},
        {"bytes:\\xa9": -0.5},
    ]


async def test_completions_take_texts_and_tokens_one_or_many(start: Any) -> None:
    stack = await start(model("Hi"))
    prompts = ["ab", [97, 98], ["ab", "c"], [[97], [98, 99]]]
    answers = [(await stack.complete(prompt=prompt, n=2)).json() for prompt in prompts]
    assert [len(a["choices"]) for a in answers] == [2, 2, 4, 4]
    assert all([c["index"] for c in a["choices"]] == list(range(len(a["choices"]))) for a in answers)
    seen = {r.prompt_ids for r in stack["u"].requests}
    assert seen == {(256, 97, 98), (97, 98), (256, 99), (97,), (98, 99)}
    assert answers[2]["usage"]["prompt_tokens"] == 5
    assert answers[2]["usage"]["prompt_tokens_details"]["cached_tokens"] == 4


async def test_a_streamed_completion(start: Any) -> None:
    stack = await start(model("Hi"))
    parts = chunks(await stack.complete(stream=True, prompt=["a", "b"]))
    texts = {0: "", 1: ""}
    for part in parts:
        texts[part["choices"][0]["index"]] += part["choices"][0]["text"]
    assert texts == {0: "Hi", 1: "Hi"}
    assert {part["object"] for part in parts} == {"text_completion"}


@pytest.mark.parametrize("how", [{"chat_template_kwargs": {"thinking": True}}, {"reasoning_effort": "high"}])
async def test_thinking_goes_to_reasoning_content_until_the_tag(start: Any, how: Any) -> None:
    stack = await start(model("I th</in>k.</think>Yes"))
    whole, _ = await both(stack, **how)
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("I th</in>k.", "Yes")
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("I th</in>k.") + 1
    assert stack["u"].requests[0].prompt_ids[-1] == 260
    cut, _ = await both(stack, max_tokens=6, **how)
    assert cut["choices"][0]["message"]["reasoning_content"] == "I th</"


async def test_stop_strings_are_looked_for_in_the_content_only(start: Any) -> None:
    stack = await start(model("no stop here</think>a stop"))
    whole, _ = await both(stack, stop="stop", reasoning_effort="low")
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("no stop here", "a ")


async def test_a_long_prompt_is_refused_with_numbers(start: Any) -> None:
    stack = await start(model("Hi", max_context_tokens=100))
    for fields in ({"prompt": "x" * 100}, {"prompt": [1] * 100}, {"prompt": "x" * 50, "max_tokens": 60}):
        response = await stack.complete(**fields)
        error = response.json()["error"]
        assert response.status_code == 400
        assert error["code"] == "context_length_exceeded"
        assert "100 tokens" in error["message"]
        assert error["param"] == "prompt"
    assert (await stack.complete(prompt="x" * 50, max_tokens=49)).status_code == 200


async def test_a_very_long_prompt_is_served(start: Any) -> None:
    stack = await start(model("Hi", max_context_tokens=1 << 20, block_keys=(b"k" * 16,)))
    response = await stack.chat(messages=[{"role": "user", "content": "word " * 100_000}])
    assert response.json()["usage"]["prompt_tokens"] == 500_004


async def test_its_keys_are_made_beside_the_event_loop_for_every_try(start: Any) -> None:
    """Those of a retry stood in everybody's way."""
    both = [model("Hello", max_context_tokens=1 << 20, block_keys=(b"k" * 16,))["u"] for _ in range(2)]
    for engine in both:
        engine.faults += [Fault("preempt", 1)]
    stack = await start({"u": both[0], "v": both[1]})
    made: list[bool] = []

    def keys(_fingerprint: Any, tokens: tuple[int, ...], _page: int) -> tuple[bytes, ...]:
        made.append(threading.current_thread() is threading.main_thread())
        return (b"%d" % len(tokens),)

    stack.gateway.dispatcher._block_keys = keys
    answer = (await stack.complete(prompt="x" * 20_000, max_tokens=50)).json()
    assert answer["choices"][0]["text"] == "Hello"
    assert len(made) >= 2
    assert not any(made)


async def test_models_are_listed_and_found(start: Any) -> None:
    stack = await start(model("Hi"), model_name="org/name")
    listed = (await stack.http.get("/v1/models")).json()
    assert [m["id"] for m in listed["data"]] == ["org/name"]
    assert (await stack.http.get("/v1/models/org/name")).json() == listed["data"][0]
    assert (await stack.http.get("/v1/models/other")).status_code == 404


async def test_probes_tell_the_truth(start: Any) -> None:
    stack = await start(model("Hi"))
    for path in ("/livez", "/readyz", "/health"):
        assert (await stack.http.get(path)).status_code == 200
    stack["u"].quarantined = True
    await stack.until(lambda: bool(stack.gateway.not_ready()))
    ready = await stack.http.get("/readyz")
    assert ready.status_code == 503
    assert "Quarantined" in ready.json()["reason"]


async def test_keys_are_asked_for_where_there_are_keys(start: Any) -> None:
    stack = await start(model("Hi"), api_keys=("k-one", "k-two"))
    for header in ({}, {"Authorization": "Bearer no"}, {"Authorization": "Basic k-one"}, {"Authorization": "Bearer"}):
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions")):
            response = await stack.http.request(method, path, headers=header)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
    for key in ("k-one", "k-two"):
        response = await stack.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
        assert response.status_code == 200
    assert (await stack.http.get("/readyz")).status_code == 200
