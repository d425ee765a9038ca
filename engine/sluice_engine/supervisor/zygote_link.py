"""A supervisor's connection to a zygote: asks for a rank, and hears of its beginning and its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import socket
import struct
from collections.abc import Callable
from pathlib import Path

# Whether it turns: answered by {"pid": n} and the end of the stream.
PING = b'{"ping": true}\n'
ZYGOTE_START_S = 120.0
LOOK_S = 0.02


class ZygoteLink:
    """`pid`: whose socket it is, as the kernel says."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.pid: int = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        self._pidfd = -1
        with contextlib.suppress(OSError):  # gone already, or of a namespace of pids that is not ours
            self._pidfd = os.pidfd_open(self.pid)

    @classmethod
    async def connect(cls, path: str) -> ZygoteLink:
        """A shared zygote may still be importing torch, or be started again. Raises TimeoutError."""
        async with asyncio.timeout(ZYGOTE_START_S):
            while True:
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                try:
                    sock.connect(path)
                    return cls(sock)
                except (FileNotFoundError, ConnectionRefusedError):
                    sock.close()
                    await asyncio.sleep(0.05)

    async def run_rank(self, spec_path: Path, rank: int, memory_fd: int, on_pid: Callable[[int], None]) -> int | None:
        """Until its end: the exit status; None: the connection ended without one. `on_pid` hears once."""
        loop, told, data = asyncio.get_running_loop(), dict[str, int](), b""
        request = json.dumps({"spec": str(spec_path), "rank": rank}).encode() + b"\n"
        with contextlib.suppress(ConnectionError):  # the zygote died before it had read that
            socket.send_fds(self._sock, [request], [memory_fd])
            self._sock.setblocking(False)
            while block := await loop.sock_recv(self._sock, 65536):
                data += block
                *lines, data = data.split(b"\n")
                for line in lines:
                    told |= (fresh := json.loads(line))
                    if "pid" in fresh:
                        on_pid(fresh["pid"])
        return told.get("exit")

    async def has_died(self, within_s: float) -> bool:
        """A process that ends closes its sockets a moment before it is gone."""
        if self._pidfd < 0:
            return not Path(f"/proc/{self.pid}").exists()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_s
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        while not ended.poll(0):
            if loop.time() > deadline:
                return False
            await asyncio.sleep(LOOK_S)
        return True

    def close(self) -> None:
        self._sock.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
