"""`python -m sluice_gateway.text.prompt_worker`: reads and tokenises large requests, for one gateway.

It is a process of its own because these take seconds of CPU and hundreds of MiB: its memory is bounded, its priority
is low, and what ends it ends no gateway. One thread reads the pipe and parses, another one tokenises, so that a bad
request is refused while a long prompt is in work. The gateway asks for one of each at a time.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import queue
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import BinaryIO

from sluice_gateway.http.bodies import parse_json
from sluice_gateway.openai.errors import ApiError, internal, unknown_token
from sluice_gateway.openai.requests import Limits
from sluice_gateway.text.encoding import PARSERS, Kind, Request, encode_request
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
    pack_ids,
    read_order,
)
from sluice_gateway.text.tokenizer import Tokenizer, load_tokenizer, tokenizer_digest
from sluice_runtime.process.processes import die_with_parent

NICE = 5
TRIM_BYTES = 1 << 20


class Worker:
    """`out` gets the replies, from both threads."""

    def __init__(self, tokenizer: Tokenizer, out: BinaryIO) -> None:
        self._tokenizer = tokenizer
        self._out = out
        self._lock = threading.Lock()
        self._parsed: dict[int, tuple[Request, Limits]] = {}
        self._encodes: queue.SimpleQueue[int] = queue.SimpleQueue()

    def serve(self, orders: BinaryIO) -> None:
        """Until the gateway closes the pipe."""
        threading.Thread(target=self._encode_all, daemon=True, name="encode").start()
        while (told := read_order(orders)) is not None:
            match told[0]:
                case Parse(job, kind, limits):
                    self._parse(job, kind, limits, told[1])
                case Encode(job):
                    self._encodes.put(job)
                case Forget(job):
                    self._parsed.pop(job, None)
            del told

    def send(self, reply: Reply, body: bytes = b"") -> None:
        with self._lock:
            self._out.write(head(reply, len(body)))
            self._out.write(body)
            self._out.flush()

    def _parse(self, job: int, kind: Kind, limits: Limits, body: bytes) -> None:
        try:
            request = PARSERS[kind](parse_json(body), limits)
            self._parsed[job] = request, limits
            self.send(Parsed(job, request.options, request.thinking))
        except ApiError as error:
            self.send(Refusal(job, error))
        except MemoryError:
            self.send(Refusal(job, None, out_of_memory=True))
        except Exception as error:
            self.send(Refusal(job, _defect(error)))

    def _encode_all(self) -> None:
        """What ends this thread ends the process: the gateway sees that, and which requests were in work."""
        try:
            while True:
                self._encode(self._encodes.get())
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)

    def _encode(self, job: int) -> None:
        found = self._parsed.pop(job, None)
        if found is None:  # forgotten meanwhile
            return
        request, limits = found
        try:
            prompts = encode_request(request, self._tokenizer, limits, counts_first=True)
            if max(map(max, prompts)) >= limits.vocab_size:
                raise unknown_token()
            data = pack_ids(prompts)
            self.send(Encoded(job, [len(prompt) for prompt in prompts]), data)
        except ApiError as error:
            self.send(Refusal(job, error))
        except MemoryError:
            self.send(Refusal(job, None, out_of_memory=True))
        except Exception as error:
            self.send(Refusal(job, _defect(error)))
        finally:
            del found, request
            _give_memory_back()


def _defect(error: Exception) -> ApiError:
    """Of ours, on one request: its text may hold a prompt, so only its type is told."""
    kind = type(error).__name__
    frame = traceback.extract_tb(error.__traceback__)[-1]
    print(f"prompt worker: {kind} in {frame.filename}:{frame.lineno}", file=sys.stderr, flush=True)
    return internal(f"The gateway failed to read this request: {kind}.")


def _give_memory_back() -> None:
    """The C library keeps what was freed, some hundred MiB after a long prompt."""
    ctypes.CDLL(None).malloc_trim(0)


def _take_pipe() -> BinaryIO:
    """The pipe to the gateway, which nothing else may write to: what prints goes to stderr."""
    fd = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(fd, "wb", buffering=0x10000)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sluice_gateway.text.prompt_worker", description="Tokenise large requests")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--memory-mib", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True, help="end when this process ends")
    arguments = parser.parse_args(argv)
    die_with_parent(arguments.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the gateway's, which ends this process
    os.nice(NICE)
    most = arguments.memory_mib << 20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core would hold prompts
    out = _take_pipe()
    worker = Worker(load_tokenizer(arguments.tokenizer), out)
    worker.send(Started(tokenizer_digest(arguments.tokenizer)))
    worker.serve(sys.stdin.buffer)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
