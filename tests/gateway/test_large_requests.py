"""Large requests: their process, its bounds, and what other requests notice of them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import orjson
import pytest

from sluice_gateway.http.bodies import LARGE_BYTES, Body, BodyBudget
from sluice_gateway.openai.errors import ApiError
from sluice_gateway.openai.requests import Limits, parse_chat, parse_completion
from sluice_gateway.status.counters import Counters
from sluice_gateway.status.marks import GatewayMarks
from sluice_gateway.text.encoding import PARSERS, Kind, encode_request
from sluice_gateway.text.large_requests import LargeRequests, WorkerSpec
from sluice_gateway.text.prepare import Preparation
from sluice_gateway.text.prompt_wire import Parse, Parsed, Refusal, Reply, head, pack_ids, read_reply, unpack_ids
from sluice_gateway.text.prompt_worker import NICE, Worker
from sluice_gateway.text.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer, tokenizer_digest

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

LIMITS = Limits(vocab_size=129_280, max_context_tokens=1 << 20)
PATIENCE_S = 120.0


def chat(text: str, **fields: Any) -> list[bytes]:
    """In parts, as it comes from a connection."""
    data = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": text}], **fields})
    return [data[at : at + 65_536] for at in range(0, len(data), 65_536)]


@asynccontextmanager
async def running(tokenizer: str, **fields: Any) -> AsyncIterator[LargeRequests]:
    digest = fields.pop("digest", "") or tokenizer_digest(tokenizer)
    spec = WorkerSpec(tokenizer, digest, **fields)
    large = LargeRequests(spec, Counters(), asyncio.get_running_loop().time)
    try:
        yield large
    finally:
        pid = large.pid
        await large.close()
        assert pid is None or not is_alive(pid)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the condition is another process
            await asyncio.sleep(0.01)


async def ids_of(large: LargeRequests, parts: list[bytes], kind: Kind = Kind.CHAT, limits: Limits = LIMITS) -> Any:
    job, _ = await large.parse(kind, parts, limits, PATIENCE_S)
    return await large.encode(job, PATIENCE_S)


async def refusal(large: LargeRequests, parts: list[bytes], limits: Limits = LIMITS) -> ApiError:
    with pytest.raises(ApiError) as refused:
        await ids_of(large, parts, limits=limits)
    return refused.value


async def test_the_worker_makes_the_tokens_that_the_gateway_would_make(v4_directory: Path, v4: FileTokenizer) -> None:
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "Wörter, a b c\n" * 30_000}]}
    async with running(str(v4_directory)) as large:
        job, parsed = await large.parse(Kind.CHAT, chat(str(body["messages"][0]["content"]), stream=True), LIMITS, 60)
        expected = parse_chat(body, LIMITS)
        assert (parsed.options, parsed.thinking) == (expected.options, False)
        assert await large.encode(job, PATIENCE_S) == encode_request(expected, v4, LIMITS)
        prompts = {"model": "m", "prompt": [[1, 2, 3], [4]]}
        assert await ids_of(large, [orjson.dumps(prompts)], Kind.COMPLETION) == ((1, 2, 3), (4,))
        assert parse_completion(prompts, LIMITS).prompts == ((1, 2, 3), (4,))


async def test_it_has_no_torch_and_no_grpc_and_gives_way(v4_directory: Path) -> None:
    async with running("bytes") as large:
        await ids_of(large, chat("hi"))
        assert large.pid is not None
        assert os.getpriority(os.PRIO_PROCESS, large.pid) == os.getpriority(os.PRIO_PROCESS, 0) + NICE
        maps = Path(f"/proc/{large.pid}/maps").read_text()
        assert "torch" not in maps
        assert "cygrpc" not in maps


async def test_a_bad_request_is_refused_while_a_long_prompt_is_in_work(v4_directory: Path) -> None:
    async with running(str(v4_directory)) as large:
        job, _ = await large.parse(Kind.CHAT, chat("a b c d " * 262_144), LIMITS, PATIENCE_S)
        long = asyncio.create_task(large.encode(job, PATIENCE_S))
        error = await refusal(large, chat("x", temperature="hot"))
        assert (error.status, error.param) == (400, "temperature")
        assert not long.done()
        assert len((await long)[0]) > 1_000_000


async def test_a_text_that_cannot_fit_is_refused_untokenised_with_the_numbers(v4_directory: Path) -> None:
    async with running(str(v4_directory)) as large:
        error = await refusal(large, chat("a b c d " * 131_072), Limits(129_280, 8192))
        assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "messages")
        assert "8192 tokens" in error.message
        assert (
            "at least 8192 tokens (it has 1048576 bytes of text, and no token stands for more than 128)"
            in error.message
        )


@pytest.mark.slow
async def test_at_a_context_of_a_million_the_tokens_are_counted_first(v4_directory: Path) -> None:
    """20 MB of 10 M tokens took 24 s and 3.8 GB; the count stops at the limit."""
    async with running(str(v4_directory)) as large:
        error = await refusal(large, chat("a b c d " * (20 * 131_072)))
        assert (error.status, error.code) == (400, "context_length_exceeded")
        assert "more than 10" in error.message
        assert large.pid is not None
        status = Path(f"/proc/{large.pid}/status").read_text()
        peak_kib = int(status.split("VmHWM:")[1].split()[0])
        assert peak_kib < 1 << 20


async def test_the_limit_of_memory_ends_one_request_and_the_others_are_served(v4_directory: Path) -> None:
    async with running(str(v4_directory), memory_mib=512) as large:
        job, _ = await large.parse(Kind.CHAT, chat("a b c d " * 300_000), Limits(129_280, 1 << 24), PATIENCE_S)
        other, _ = await large.parse(Kind.CHAT, chat("hello " * 50_000), LIMITS, PATIENCE_S)
        first, second = await asyncio.gather(
            large.encode(job, PATIENCE_S), large.encode(other, PATIENCE_S), return_exceptions=True
        )
        assert isinstance(first, ApiError)
        assert (first.status, first.code) == (413, "prompt_too_large")
        assert "512 MiB" in first.message
        assert not isinstance(second, BaseException)
        assert len(second[0]) > 50_000
        assert large._counters.worker_deaths == 1


async def test_one_that_takes_too_long_is_ended_and_the_next_one_is_served(v4_directory: Path) -> None:
    async with running(str(v4_directory), job_s=3.0) as large:
        error = await refusal(large, chat("a b c d " * 900_000), Limits(129_280, 1 << 24))
        assert (error.status, error.code, error.again) == (503, "prompt_timeout", False)
        assert len((await ids_of(large, chat("hi")))[0]) == 5
        assert large._counters.worker_deaths == 1


async def test_a_worker_that_is_killed_is_started_again_and_the_request_does_not_notice(
    v4_directory: Path, v4: FileTokenizer
) -> None:
    text = "a b c d " * 131_072
    expected = encode_request(parse_chat(orjson.loads(b"".join(chat(text))), LIMITS), v4, LIMITS)
    async with running(str(v4_directory)) as large:
        job, _ = await large.parse(Kind.CHAT, chat(text), LIMITS, PATIENCE_S)
        encoding = asyncio.create_task(large.encode(job, PATIENCE_S))
        await until(lambda: job.runs)
        first = large.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        assert await encoding == expected
        assert large.pid != first


async def test_one_that_does_not_start_is_an_error_and_the_next_request_tries_again() -> None:
    async with running("/nowhere", digest="x") as large:
        for _ in range(2):
            error = await refusal(large, chat("hi"))
            assert (error.status, error.code, error.retry_after_s) == (503, "prompt_worker_lost", 1)
            assert "it ended with 1" in error.message


async def test_one_that_has_read_another_tokenizer_is_not_used(v4_directory: Path) -> None:
    async with running(str(v4_directory), digest="of another file") as large:
        assert "restart the gateway" in (await refusal(large, chat("hi"))).message


async def test_a_request_that_nobody_waits_for_leaves_nothing(v4_directory: Path) -> None:
    async with running("bytes") as large:
        job, _ = await large.parse(Kind.CHAT, chat("hi"), LIMITS, PATIENCE_S)
        large.drop(job)
        going = asyncio.create_task(ids_of(large, chat("hi")))
        await asyncio.sleep(0)
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)
        await ids_of(large, chat("hi"))
        await until(lambda: not large._jobs)


async def test_so_many_at_a_time_and_no_more() -> None:
    async with running("bytes", most=2) as large:
        jobs = [(await large.parse(Kind.CHAT, chat("hi"), LIMITS, PATIENCE_S))[0] for _ in range(2)]
        error = await refusal(large, chat("hi"))
        assert (error.status, error.code, error.retry_after_s) == (429, "too_many_large_requests", 1)
        large.drop(jobs[0])
        assert len((await ids_of(large, chat("hi")))[0]) == 6


def test_ids_travel_as_four_bytes_each() -> None:
    prompts = (tuple(range(200_000)), (129_279,))
    assert len(pack_ids(prompts)) == 4 * 200_001
    assert unpack_ids([200_000, 1], pack_ids(prompts)) == prompts


def test_the_digest_of_a_tokenizer_is_that_of_its_file(v4_directory: Path) -> None:
    assert len(tokenizer_digest(str(v4_directory))) == 32
    assert tokenizer_digest("bytes") == "bytes"
    assert load_tokenizer(str(v4_directory)).longest_plain == 128


async def test_a_large_request_is_served_over_http_and_leaves_nothing(start: Any) -> None:
    """Served, refused for its model, for its length, and given up by its client."""
    spec = WorkerSpec("bytes", "bytes")
    stack = await start(worker=spec)
    large = stack.gateway.large
    assert large is not None
    spaces = " " * 300_000  # of JSON: the body is large, and the text is not
    text = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}).decode()
    headers = {"content-type": "application/json"}

    async def post(body: str) -> Any:
        return await stack.http.post("/v1/chat/completions", content=body, headers=headers)

    answer = await post(text[:-1] + spaces + "}")
    assert (answer.status_code, answer.json()["choices"][0]["message"]["content"]) == (200, "The ")
    assert (await post(text.replace('"m"', '"other"') + spaces)).status_code == 404
    too_long = await post(text.replace("hi", "x" * 300_000))
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert (await post("{" + spaces)).json()["error"]["code"] == "invalid_json"
    counters = stack.gateway.counters
    assert (counters.large_requests, counters.large_refused, counters.worker_deaths) == (4, 2, 0)
    await stack.until(lambda: not large._jobs)
    assert stack.gateway.bodies.held == 0


async def test_a_gateway_that_ends_says_so_to_what_it_is_still_reading(start: Any) -> None:
    """Before: only choices that ran were told, and a connection whose prompt was being read was cut."""
    stack = await start(worker=WorkerSpec("bytes", "bytes"))
    large = stack.gateway.large
    assert large is not None
    body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 300_000}], "max_tokens": 4})
    headers = {"content-type": "application/json"}
    asking = asyncio.create_task(stack.http.post("/v1/chat/completions", content=body, headers=headers))
    await stack.until(lambda: bool(large._jobs))
    stack.gateway.stop()
    answer = await asking
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    assert stack.gateway.bodies.held == 0


async def test_a_client_that_leaves_while_its_prompt_is_read_leaves_nothing(start: Any) -> None:
    stack = await start(worker=WorkerSpec("bytes", "bytes"))
    large = stack.gateway.large
    assert large is not None
    body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 300_000}], "max_tokens": 4})
    headers = {"content-type": "application/json"}
    asking = asyncio.create_task(stack.http.post("/v1/chat/completions", content=body, headers=headers))
    await stack.until(lambda: bool(large._jobs))
    (job,) = large._jobs.values()
    asking.cancel()
    await stack.until(lambda: job.is_abandoned)
    await stack.until(lambda: stack.gateway.counters.disconnected == 1)
    assert stack.gateway.bodies.held == 0
    await stack.until(lambda: not large._jobs)


def read_replies(data: bytes) -> list[Reply]:
    """As the gateway reads them."""

    async def read() -> list[Reply]:
        stream = asyncio.StreamReader()
        stream.feed_data(data)
        stream.feed_eof()
        found = []
        while not stream.at_eof():
            found.append((await read_reply(stream))[0])
        return found

    return asyncio.run(read())


def test_a_defect_on_one_request_is_told_by_its_type_and_the_next_one_is_read(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It ended the worker, and the gateway told the client that its prompt was too large."""
    out, orders = BytesIO(), BytesIO()
    for job, body in enumerate((b'{"prompt": "secret", "model": "m"}', b'{"prompt": "hi", "model": "m"}')):
        orders.write(head(Parse(job, Kind.COMPLETION, LIMITS), len(body)) + body)
    orders.seek(0)
    real = PARSERS[Kind.COMPLETION]

    def parse(body: Any, limits: Limits) -> Any:
        if body["prompt"] == "secret":
            raise ZeroDivisionError("secret")
        return real(body, limits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PARSERS, Kind.COMPLETION, parse)
        Worker(ByteTokenizer(), out).serve(orders)
    first, second = read_replies(out.getvalue())
    assert isinstance(first, Refusal)
    assert first.error is not None
    assert (first.error.status, first.error.message) == (
        500,
        "The gateway failed to read this request: ZeroDivisionError.",
    )
    assert isinstance(second, Parsed)
    said = capfd.readouterr().err
    assert "ZeroDivisionError in" in said
    assert "secret" not in said


async def test_a_worker_that_ends_by_itself_is_no_matter_of_size(v4_directory: Path) -> None:
    """SIGKILL and an abort may be the memory; any other end is told as what it is, and may be retried."""
    async with running(str(v4_directory)) as large:
        for status, code in ((-signal.SIGKILL, "prompt_too_large"), (-signal.SIGABRT, "prompt_too_large"),
                             (-signal.SIGSEGV, "prompt_worker_lost"), (1, "prompt_worker_lost")):  # fmt: skip
            asking = asyncio.create_task(refusal(large, chat("hello " * 50_000)))
            await until(lambda: any(job.runs for job in large._jobs.values()))
            (job,) = large._jobs.values()
            job.alone = True  # it was in work alone when a worker died before
            large._on_death(status)
            assert (await asking).code == code


async def test_a_request_has_one_deadline_from_its_arrival_on() -> None:
    """Parsing, tokenising and the queue each had the whole of it."""
    now, given = [100.0], []

    class Slow:
        async def parse(self, kind: Any, parts: Any, limits: Any, within_s: float) -> Any:
            given.append(within_s)
            now[0] += 3.0
            return object(), Parsed(0, None, False)  # type: ignore[arg-type]

        async def encode(self, job: Any, within_s: float) -> Any:
            given.append(within_s)
            return ((1,),)

    body = Body(BodyBudget(1 << 30))
    assert body.add(bytes(LARGE_BYTES + 1))
    clock = lambda: now[0]  # noqa: E731
    preparing = Preparation(ByteTokenizer(), GatewayMarks(None), Slow(), lambda: LIMITS, Counters(), clock)  # type: ignore[arg-type]
    prepared = await preparing.prepare(body, Kind.CHAT, 5.0)
    await prepared.encode()
    assert given == [5.0, 2.0]
