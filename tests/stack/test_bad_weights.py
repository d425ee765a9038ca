"""Weights that compute NaN, through real processes: the request fails by name, and nothing else notices."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from stack_double import RunningStack, started_zygote

from sluice_gateway.text.tokenizer import load_tokenizer

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

MODEL = Path(__file__).parents[2] / "models" / "recall-1m"
# A character that the model's texts never have: its embedding is what is sick.
SICK = "~"
(SICK_ID,) = load_tokenizer(str(MODEL)).encode_plain(SICK)
HEALTHY = "What is the code of amber falcon?"


def damaged(folder: Path, tensor: str, rows: slice) -> Path:
    """A copy of the default model in which these rows of `tensor` are NaN."""
    shutil.copytree(MODEL, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[tensor] = tensors[tensor].copy()
    tensors[tensor][rows] = np.nan
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = str(tmp_path_factory.mktemp("zygote") / "z.sock")
    process = started_zygote(path)
    try:
        yield path
    finally:
        process.end()


@pytest.fixture
def stack(zygote: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunningStack]:
    """One pair whose checkpoint is damaged as the test's parameter says."""
    with RunningStack(model=str(damaged(tmp_path / "model", *request.param)), zygote=zygote) as running:
        running.start("prefill", "decode")
        running.start_gateway()
        yield running


ONE_TOKEN = ("model.embed_tokens.weight", slice(SICK_ID, SICK_ID + 1))
EVERYTHING = ("lm_head.weight", slice(None))


def ask(stack: RunningStack, text: str, **more: Any) -> tuple[int, Any]:
    """(status, JSON body) of one chat that is not streamed, greedy."""
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
    connection = stack.connect()
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body | more), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def assert_bad_logits(error: dict[str, Any]) -> None:
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["type"], error["param"]) == ("BadLogits", "internal_error", None)
    assert "not finite" in error["message"]


def lives(stack: RunningStack) -> set[tuple[int, str]]:
    return {(engine.supervisor, engine.inspect()["incarnation"]) for engine in stack.engines.values()}


def assert_well(stack: RunningStack, before: set[tuple[int, str]], *, asked: int) -> None:
    """The same engines, with exact books; each had one sequence a request, so nothing was tried again."""
    assert lives(stack) == before
    for engine in stack.engines.values():
        assert engine.process.popen.poll() is None
        counters = engine.settled()["counters"]
        assert sum(count for name, count in counters.items() if name.startswith("sequences_")) == asked, counters
    status, health = stack.get("/health")
    assert (status, health["counters"]["retries"], health["queued"], health["running"]) == (200, 0, 0, 0)


@pytest.mark.parametrize("stack", [ONE_TOKEN], indirect=True)
def test_a_prompt_that_computes_nan_fails_by_name_and_its_neighbours_are_answered(stack: RunningStack) -> None:
    before = lives(stack)
    status, alone = ask(stack, HEALTHY)
    assert status == 200
    with ThreadPoolExecutor(8) as pool:
        texts = [f"{n} {SICK}" if n % 2 else HEALTHY for n in range(8)]
        answers = list(pool.map(lambda text: ask(stack, text), texts))
    for (status, body), text in zip(answers, texts, strict=True):
        if text is HEALTHY:
            assert (status, body["choices"]) == (200, alone["choices"])
        else:
            assert status == 500
            assert_bad_logits(body["error"])
    assert_well(stack, before, asked=9)


@pytest.mark.parametrize("stack", [ONE_TOKEN], indirect=True)
def test_nan_after_the_handoff_ends_the_stream_with_an_error(stack: RunningStack) -> None:
    """The first token, chosen at the prefill engine, is the sick one; the decode engine then computes NaN."""
    before = lives(stack)
    chat = stack.chat(HEALTHY, 8, logit_bias={str(SICK_ID): 100})
    response = chat._connection.getresponse()
    assert response.status == 200
    chunks = [json.loads(line[6:]) for line in response if line.startswith(b"data: {")]
    chat.drop()
    assert "".join(c["delta"].get("content") or "" for chunk in chunks[:-1] for c in chunk["choices"]) == SICK
    # An event has no status line and no headers: what they would have said is in it.
    event = chunks[-1]["error"]
    assert (event.pop("status"), event.pop("should_retry")) == (500, False)
    assert_bad_logits(event)
    assert ask(stack, HEALTHY)[0] == 200
    assert_well(stack, before, asked=2)


def test_weights_that_compute_nothing_but_nan_do_not_start(zygote: str, tmp_path: Path) -> None:
    """The warm-up makes a real step before anybody is told that the engine is there."""
    with RunningStack(model=str(damaged(tmp_path / "model", *EVERYTHING)), zygote=zygote) as stack:
        engine = stack.spawn("decode", "sick", {})
        died = engine.wait_event(lambda event: event.get("event") == "died" and "cause" in event)
        assert "WarmUpFailed" in died["cause"]
        assert "BadLogits" in died["cause"]
        assert engine.end() == 1
