"""What gateway and prompt worker say to each other: frames of a head (MessagePack) and a body (bytes), both counted."""

from __future__ import annotations

import asyncio
import struct
from array import array
from typing import BinaryIO

import msgspec

from sluice_gateway.openai.errors import ApiError
from sluice_gateway.openai.requests import Limits, Options
from sluice_gateway.text.encoding import Kind, Prompts

_SIZES = struct.Struct("<IQ")
SLICE = 65_536


class Parse(msgspec.Struct, tag=True):
    """The frame's body is that of the HTTP request."""

    job: int
    kind: Kind
    limits: Limits


class Encode(msgspec.Struct, tag=True):
    job: int


class Forget(msgspec.Struct, tag=True):
    job: int


class Started(msgspec.Struct, tag=True):
    """`digest`: of the tokenizer that the worker has read."""

    digest: str


class Parsed(msgspec.Struct, tag=True):
    job: int
    options: Options
    thinking: bool


class Encoded(msgspec.Struct, tag=True):
    """The frame's body has the ids of all prompts, one behind the other."""

    job: int
    counts: list[int]


class Refusal(msgspec.Struct, tag=True):
    """`out_of_memory`: the answer is the gateway's, which knows the limit."""

    job: int
    error: ApiError | None
    out_of_memory: bool = False


Order = Parse | Encode | Forget
Reply = Started | Parsed | Encoded | Refusal

_encode = msgspec.msgpack.Encoder().encode
_order = msgspec.msgpack.Decoder(Order)
_reply = msgspec.msgpack.Decoder(Reply)


def head(message: Order | Reply, body_bytes: int = 0) -> bytes:
    """The frame up to its body."""
    data = _encode(message)
    return _SIZES.pack(len(data), body_bytes) + data


def read_order(stream: BinaryIO) -> tuple[Order, bytes] | None:
    """The next one; None at the end of the stream."""
    sizes = stream.read(_SIZES.size)
    if len(sizes) < _SIZES.size:
        return None
    head_bytes, body_bytes = _SIZES.unpack(sizes)
    order = _order.decode(stream.read(head_bytes))
    return order, stream.read(body_bytes)


async def read_reply(stream: asyncio.StreamReader) -> tuple[Reply, bytes]:
    """Raises asyncio.IncompleteReadError at the end of the stream."""
    head_bytes, body_bytes = _SIZES.unpack(await stream.readexactly(_SIZES.size))
    reply = _reply.decode(await stream.readexactly(head_bytes))
    return reply, await stream.readexactly(body_bytes)


def pack_ids(prompts: Prompts) -> bytes:
    return b"".join(array("i", prompt).tobytes() for prompt in prompts)


def unpack_ids(counts: list[int], data: bytes) -> Prompts:
    """Ids are 4 bytes each, for the vocabulary is far below 2^31. They are made in slices: a million of them in one
    call would keep every other thread from the interpreter for 40 ms."""
    ids = memoryview(data).cast("i")
    prompts, at = [], 0
    for count in counts:
        prompt: list[int] = []
        for start in range(at, at + count, SLICE):
            prompt += ids[start : min(start + SLICE, at + count)].tolist()
        at += count
        prompts.append(tuple(prompt))
    return tuple(prompts)
