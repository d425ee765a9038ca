"""A source between a decode engine and the real one that says something else than it heard. And a bare gateway."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
from stack_double import KEY, EngineProcess, RunningStack

from sluice_engine.spec import load_spec, resolve
from sluice_protocol import codec
from sluice_protocol.generate import SCHEMA_VERSION
from sluice_protocol.sampling import Sampling
from sluice_protocol.source import Open, WantPrefill
from sluice_protocol.v1 import engine_pb2, engine_pb2_grpc, source_pb2, source_pb2_grpc
from sluice_runtime.rpc.options import KEY_HEADER, OPTIONS

METADATA = ((KEY_HEADER, KEY),)
Lie = Callable[[source_pb2.SourceMessage], list[source_pb2.SourceMessage]]


class LyingSource(source_pb2_grpc.SourceServicer):
    """`lie` turns each message of the real source into what the reader hears. Leases whose number (from 1) is in
    `aborts` end at once with a status of their own."""

    def __init__(self, real: EngineProcess) -> None:
        self._channel = grpc.insecure_channel(real.ready["source_address"])
        self._real = source_pb2_grpc.SourceStub(self._channel)
        self.lie: Lie = lambda message: [message]
        self.aborts: set[int] = set()
        self.leases = 0
        self._lock = threading.Lock()

    def Hello(self, request: Any, context: Any) -> Any:
        return self._real.Hello(request, metadata=METADATA)

    def Lease(self, request_iterator: Any, context: Any) -> Iterator[Any]:
        with self._lock:
            self.leases += 1
            number = self.leases
        if number in self.aborts:
            next(request_iterator)
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "lease: this one only")
        call = self._real.Lease(request_iterator, metadata=METADATA)
        context.add_callback(call.cancel)
        try:
            for together in call:
                told = [lie for message in together.messages for lie in self.lie(message)]
                if told:
                    yield source_pb2.SourceMessages(messages=told)
        except grpc.RpcError as error:
            context.abort(error.code(), error.details())

    @contextmanager
    def serving(self) -> Iterator[str]:
        """The address."""
        server = grpc.server(futures.ThreadPoolExecutor(32), options=OPTIONS)
        source_pb2_grpc.add_SourceServicer_to_server(self, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(0).wait(10)
            self._channel.close()


class BareGateway:
    """Attach and Generate, nothing else. Use as a context manager."""

    def __init__(self, decode: EngineProcess) -> None:
        self._channel = grpc.insecure_channel(decode.address)
        self.stub = engine_pb2_grpc.EngineStub(self._channel)
        self._streams = itertools.count()

    def __enter__(self) -> BareGateway:
        self._attach = self.stub.Attach(engine_pb2.AttachRequest(gateway_id="bare"), metadata=METADATA)
        next(self._attach)
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._attach.cancel()
        self._reading.join(10)
        self._channel.close()

    def _read(self) -> None:
        try:
            for _ in self._attach:
                pass
        except grpc.RpcError:
            pass

    def generate(self, address: str, prompt: list[int], *, max_tokens: int = 6, timeout: float = 20.0) -> Any:
        """Ended, or Refused."""
        request = engine_pb2.GenerateRequest(
            request_id="r",
            gateway_id="bare",
            prompt_ids=prompt,
            sampling=engine_pb2.Sampling(max_tokens=max_tokens, top_p=1.0, repetition_penalty=1.0),
            source_address=address,
            stream=next(self._streams),
        )
        last = self.stub.Generate(request, metadata=METADATA, timeout=timeout)
        return last.ended if last.HasField("ended") else last.refused


def open_message(stack: RunningStack, prefill: EngineProcess, channel: grpc.Channel, *, ttl_ms: int) -> Any:
    """Open for a prompt of 300 tokens, as a reader with the right fingerprint sends it."""
    path = next(stack.directory.glob(f"{prefill.name}-*/spec.json"))
    fingerprint = resolve(load_spec(path)).fingerprint
    hello = source_pb2_grpc.SourceStub(channel).Hello(
        source_pb2.SourceHelloRequest(schema_version=SCHEMA_VERSION, fingerprint=fingerprint.as_dict()),
        metadata=METADATA,
        timeout=20,
    )
    want = WantPrefill(tuple(range(300)), (), Sampling(max_tokens=5))
    return codec.encode_reader_message(Open("test", hello.incarnation, fingerprint, want, 0, ttl_ms))
