"""A TCP proxy before the API server, whose connections a test cuts, stalls or refuses. TLS goes through untouched."""

from __future__ import annotations

import asyncio
import threading
from typing import Self


class TcpProxy:
    """`url`: what to dial instead. A loop in a thread of its own; all orders return when they are carried out."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tcp-proxy")
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self.port = 0

    def __enter__(self) -> Self:
        self._thread.start()
        self._order(self._start())
        return self

    def __exit__(self, *exc: object) -> None:
        self._order(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def cut(self) -> int:
        """Reset every connection, and tell how many there were; new ones are welcome."""
        return self._order(self._cut())

    def stall(self) -> None:
        """From now on nothing goes either way, on old and new connections; nobody is told."""
        self._order(self._set(False))

    def flow(self) -> None:
        """What had stalled goes on."""
        self._order(self._set(True))

    def swallow(self) -> int:
        """Nothing more comes through connections that are open now, and nobody is told; new ones are as ever. Returns
        how many there are."""
        return self._order(self._swallow())

    def _order(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    async def _start(self) -> None:
        self._flows.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        self._server.close()
        await self._cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _cut(self) -> int:
        cut = len(self._writers)
        for writer in list(self._writers):
            writer.transport.abort()
        return cut // 2

    async def _set(self, flows: bool) -> None:
        if flows:
            self._flows.set()
        else:
            self._flows.clear()

    async def _swallow(self) -> int:
        self._flows.clear()
        self._flows = asyncio.Event()
        self._flows.set()
        return len(self._writers) // 2

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        except OSError:
            writer.transport.abort()
            self._tasks.discard(task)
            return
        self._writers |= {writer, far_writer}
        flows = self._flows
        try:
            await asyncio.gather(self._pump(reader, far_writer, flows), self._pump(far_reader, writer, flows))
        except OSError:
            pass
        finally:
            for each in (writer, far_writer):
                each.transport.abort()
                self._writers.discard(each)
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flows: asyncio.Event) -> None:
        """An end of one direction ends both: nobody here half-closes."""
        while data := await reader.read(65536):
            await flows.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])
