"""Channels to peers of our deployment. Peers are dialled by address and must have the right certificate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from sluice_runtime.tls.identity import Identity
from sluice_runtime.tls.peers import Peer

Options = Sequence[tuple[str, Any]]


def open_channel(address: str, peer: Peer, identity: Identity | None, options: Options) -> grpc.aio.Channel:
    """`identity` None: in plain text."""
    if identity is None:
        return grpc.aio.insecure_channel(address, options=list(options))
    expected = ("grpc.ssl_target_name_override", str(identity.name.of(peer)))
    credentials = grpc.ssl_channel_credentials(identity.authorities, identity.key, identity.certificate)
    return grpc.aio.secure_channel(address, credentials, options=[*options, expected])


class Line:
    """One channel, and how many calls are on it."""

    def __init__(self, identity: Identity | None, channel: grpc.aio.Channel, stub: Any) -> None:
        self.identity, self.channel, self.stub = identity, channel, stub
        self.calls = 0


class Lines:
    """To one peer: a new channel whenever our identity is another, while calls that run keep theirs.

    `open_` makes a channel, `stub` what calls are made with; `current` is asked at each call.
    """

    def __init__(
        self,
        open_: Callable[[Identity | None], grpc.aio.Channel],
        stub: Callable[[grpc.aio.Channel], Any],
        current: Callable[[], Identity | None],
    ) -> None:
        self._open, self._stub, self._current = open_, stub, current
        self._line: Line | None = None
        self._old: set[Line] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def call(self, method: str, request: Any, **more: Any) -> Any:
        """A gRPC call of that name, begun."""
        line = self._present()
        call = getattr(line.stub, method)(request, **more)
        line.calls += 1
        call.add_done_callback(lambda _: self._done(line))
        return call

    async def close(self) -> None:
        """Ends what runs."""
        lines = [*self._old, *([] if self._line is None else [self._line])]
        self._line = None
        self._old.clear()
        for line in lines:
            await line.channel.close(None)
        await asyncio.gather(*self._closing)

    def _present(self) -> Line:
        identity, line = self._current(), self._line
        if line is None or line.identity is not identity:
            channel = self._open(identity)
            self._line = Line(identity, channel, self._stub(channel))
            if line is not None:
                self._old.add(line)
                self._close_unused(line)
            return self._line
        return line

    def _done(self, line: Line) -> None:
        line.calls -= 1
        self._close_unused(line)

    def _close_unused(self, line: Line) -> None:
        if line in self._old and not line.calls:
            self._old.discard(line)
            task = asyncio.get_running_loop().create_task(line.channel.close(None))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
