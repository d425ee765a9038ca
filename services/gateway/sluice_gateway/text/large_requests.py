"""Large requests are read and tokenised by one worker process, so that no other request notices them.

The worker is started with the first of them, and again when it has died. A job keeps its body until its tokens are
there: a death of the worker ends the job that it is due to, and the others begin anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from sluice_gateway.openai import errors
from sluice_gateway.openai.errors import ApiError
from sluice_gateway.openai.requests import Limits
from sluice_gateway.status.counters import Counters
from sluice_gateway.text.encoding import Kind, Prompts
from sluice_gateway.text.prompt_queue import Entry, Phase, blame, next_starts
from sluice_gateway.text.prompt_wire import (
    Encode,
    Encoded,
    Forget,
    Parse,
    Parsed,
    Refusal,
    Reply,
    Started,
    head,
    read_reply,
    unpack_ids,
)
from sluice_runtime import log
from sluice_runtime.process.processes import child_environment

START_S = 60.0
"""The worker reads the tokenizer first; on a machine that is busy this takes seconds."""
PAUSE_S = 1.0
"""Between two starts of a worker that did not come up."""
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """`job_s`: how long parsing or tokenising of one request may take. `most`: requests at a time, waiting ones
    included. `digest`: of the tokenizer that the gateway itself has read."""

    tokenizer: str
    digest: str
    memory_mib: int = 2048
    job_s: float = 120.0
    most: int = 64


@dataclass(eq=False, slots=True)
class LargeJob:
    number: int
    kind: Kind
    limits: Limits
    parts: Sequence[bytes | bytearray]
    parsed: asyncio.Future[Parsed]
    encoded: asyncio.Future[Prompts]
    phase: Phase = Phase.PARSE
    runs: bool = False
    alone: bool = False
    wants_ids: bool = False
    is_abandoned: bool = False
    timer: asyncio.TimerHandle | None = field(default=None)

    @property
    def entry(self) -> Entry:
        return Entry(self.number, self.phase, self.runs, self.alone)

    def stop(self) -> None:
        self.runs = False
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def fail(self, error: ApiError) -> None:
        """The request that waits gets the error, if one does."""
        for future in (self.parsed, self.encoded):
            if not future.done():
                future.set_exception(error)
                future.exception()  # it is no error of ours when it is not looked at


class LargeRequests:
    """`parse`, then `encode`; `drop` whatever happened in between."""

    def __init__(self, spec: WorkerSpec, counters: Counters, clock: Callable[[], float]) -> None:
        self.spec = spec
        self._counters = counters
        self._clock = clock
        self._numbers = count()
        self._jobs: dict[int, LargeJob] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._writes: asyncio.Queue[list[bytes | bytearray]] = asyncio.Queue()
        self._overrun: int | None = None
        self._living: asyncio.Task[None] | None = None
        self._unpacks: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def parse(
        self, kind: Kind, parts: Sequence[bytes | bytearray], limits: Limits, within_s: float
    ) -> tuple[LargeJob, Parsed]:
        """Raises ApiError."""
        if len(self._jobs) >= self.spec.most:
            raise errors.too_many_large(self.spec.most)
        loop = asyncio.get_running_loop()
        job = LargeJob(next(self._numbers), kind, limits, parts, loop.create_future(), loop.create_future())
        self._jobs[job.number] = job
        if self._living is None or self._living.done():
            self._living = loop.create_task(self._live(), name="prompt worker")
        self._begin_next()
        try:
            return job, await self._within(job.parsed, within_s)
        except BaseException:
            self.drop(job)
            raise

    async def encode(self, job: LargeJob, within_s: float) -> Prompts:
        """Raises ApiError."""
        job.wants_ids = True
        if job.phase is Phase.PARSED:
            job.phase = Phase.ENCODE
        self._begin_next()
        try:
            prompts: Prompts = await self._within(job.encoded, within_s)
            return prompts
        finally:
            self.drop(job)

    async def _within(self, future: asyncio.Future[Any], seconds: float) -> Any:
        began = self._clock()
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(future)
        except TimeoutError:
            waited = self._clock() - began
            raise errors.deadline_exceeded(waited, "large requests are tokenised one after the other") from None

    def drop(self, job: LargeJob) -> None:
        """The request does not wait for it any more. The worker finishes what it is at."""
        job.parts = ()
        job.is_abandoned = True
        if job.number in self._jobs and not job.runs:
            del self._jobs[job.number]
            self._write(head(Forget(job.number)))

    async def close(self) -> None:
        if self._living is not None:
            self._living.cancel()
            await asyncio.gather(self._living, return_exceptions=True)
        self.fail_all(errors.unavailable("The gateway is shutting down.", "shutting_down"))

    # -- what the worker is at

    def _begin_next(self) -> None:
        if self._process is None:
            return
        for number in next_starts([job.entry for job in self._jobs.values()]):
            job = self._jobs[number]
            job.runs = True
            job.timer = asyncio.get_running_loop().call_later(self.spec.job_s, self._overran, job)
            if job.phase is Phase.PARSE:
                body = sum(map(len, job.parts))
                self._write(head(Parse(job.number, job.kind, job.limits), body), *job.parts)
            else:
                self._write(head(Encode(job.number)))

    def _overran(self, job: LargeJob) -> None:
        self._overrun = job.number
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def _write(self, *parts: bytes | bytearray) -> None:
        if self._process is not None:
            self._writes.put_nowait(list(parts))

    def _on_reply(self, reply: Reply, body: bytes) -> None:
        assert not isinstance(reply, Started)
        job = self._jobs.get(reply.job)
        if job is None:
            return
        job.stop()
        match reply:
            case Parsed():
                job.phase = Phase.ENCODE if job.wants_ids else Phase.PARSED
                if not job.parsed.done():
                    job.parsed.set_result(reply)
            case Encoded(counts=counts):
                self._unpack(job, counts, body)
            case Refusal(error=error):
                self._counters.large_refused += 1
                job.fail(error or errors.prompt_too_large(self.spec.memory_mib))
        if not isinstance(reply, Parsed):
            del self._jobs[job.number]
        elif job.is_abandoned:
            self.drop(job)
        self._begin_next()

    def _unpack(self, job: LargeJob, counts: list[int], body: bytes) -> None:
        async def unpack() -> None:
            prompts = await asyncio.to_thread(unpack_ids, counts, body)
            if not job.encoded.done():
                job.encoded.set_result(prompts)

        task = asyncio.get_running_loop().create_task(unpack())
        self._unpacks.add(task)
        task.add_done_callback(self._unpacks.discard)

    # -- the process

    async def _live(self) -> None:
        """As long as the gateway: start it, and start it again when it has died. Ends when it does not come up."""
        try:
            await self._start_again_and_again()
        except Exception as error:  # a defect of ours: the next large request starts anew
            self._counters.worker_deaths += 1
            log.warning("the prompt worker is given up", error=repr(error))
            self.fail_all(errors.prompt_worker_lost("a defect of the gateway, which its log names"))

    async def _start_again_and_again(self) -> None:
        tries = 0
        while True:
            process = await self._start()
            if isinstance(process, str):
                self._counters.worker_deaths += 1
                log.warning("the prompt worker did not start", cause=process)
                tries += 1
                if tries >= 3:
                    self.fail_all(errors.prompt_worker_lost(process))
                    return
                await asyncio.sleep(PAUSE_S)
                continue
            tries = 0
            await self._serve(process)
            await asyncio.sleep(PAUSE_S)  # one that dies as soon as it has started must not keep a core busy

    async def _start(self) -> asyncio.subprocess.Process | str:
        """What has said that it is there; or why none is."""
        command = [sys.executable, "-m", "sluice_gateway.text.prompt_worker", "--tokenizer", self.spec.tokenizer]
        command += ["--memory-mib", str(self.spec.memory_mib), "--parent", str(os.getpid())]
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, env={**child_environment(), **ENVIRONMENT}, limit=1 << 20
            )
        except OSError as error:
            return str(error)
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_S):
                reply, _ = await read_reply(process.stdout)
            if isinstance(reply, Started) and reply.digest == self.spec.digest:
                return process
            why = f"{self.spec.tokenizer} is not the tokenizer that this gateway has read: restart the gateway"
        except TimeoutError:
            why = f"it was not there within {START_S:g} s"
        except asyncio.IncompleteReadError:
            why = f"it ended with {await process.wait()}; its stderr says why"
        except BaseException:
            await _end(process)
            raise
        await _end(process)
        return why

    async def _serve(self, process: asyncio.subprocess.Process) -> None:
        """Until it dies."""
        assert process.stdout is not None
        self._process, self._writes, self._overrun = process, asyncio.Queue(), None
        writing = asyncio.get_running_loop().create_task(self._write_all(process))
        try:
            self._begin_next()
            while True:
                self._on_reply(*await read_reply(process.stdout))
        except asyncio.IncompleteReadError:
            status = await process.wait()
            self._process = None
            self._on_death(status)
        finally:
            self._process = None
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            await _end(process)

    async def _write_all(self, process: asyncio.subprocess.Process) -> None:
        """What the worker does not read waits here, not in the loop."""
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):
            while True:
                for part in await self._writes.get():
                    process.stdin.write(part)
                    await process.stdin.drain()

    def _on_death(self, status: int) -> None:
        found = blame([job.entry for job in self._jobs.values()], status, self._overrun)
        is_slow = self._overrun is not None
        self._counters.worker_deaths += 1
        log.warning("the prompt worker died", status=status, overran=is_slow, jobs=len(self._jobs))
        # Too much memory ends a process by SIGKILL or, in the tokenizer's library, by an abort. Any other end has
        # nothing to do with the size of the request.
        other = errors.prompt_worker_lost(f"it ended with {status} while it read this request")
        wants_memory = status in (-signal.SIGKILL, -signal.SIGABRT)
        ended = errors.prompt_too_large(self.spec.memory_mib) if wants_memory else other
        error = errors.prompt_too_slow(self.spec.job_s) if is_slow else ended
        for job in list(self._jobs.values()):
            job.stop()
            job.alone = job.alone or job.number in found.alone
            if job.number in found.failed:
                self._counters.large_refused += 1
                job.fail(error)
            if job.number in found.failed or job.is_abandoned:
                del self._jobs[job.number]
            else:
                job.phase = Phase.PARSE

    def fail_all(self, error: ApiError) -> None:
        """Whatever is being read or tokenised ends with it."""
        for job in list(self._jobs.values()):
            job.stop()
            job.fail(error)
        self._jobs.clear()


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    await process.wait()
