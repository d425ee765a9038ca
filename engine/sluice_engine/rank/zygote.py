"""A process that has imported torch and nothing else that owns threads; ranks are forked from it.

On its Unix socket: one connection per rank. The asker sends a JSON line {"spec": path, "rank": n} with the memory's
file descriptor, gets {"pid": n}, and when that rank has ended {"exit": status} and the end of the stream. The end of
the connection on the asker's side ends the rank, and so does anything more it says. Whatever is wrong with a request
ends its own connection: the ranks of all engines hang on this process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from sluice_engine.rank.rank import serve
from sluice_engine.spec import load_spec
from sluice_engine.supervisor.zygote_link import PING
from sluice_runtime.descriptors import raise_limit
from sluice_runtime.health.stacks import answer_with_stacks
from sluice_runtime.process.outlet import drop_what_nobody_reads
from sluice_runtime.process.processes import die_with_parent, say

MAX_REQUEST_BYTES = 64 * 1024
# A connection that has sent no request by then is closed.
REQUEST_S = 10.0
CROWDED_S = 0.05


class _BadRequest(Exception):
    pass


@dataclass(slots=True, eq=False)
class _Asker:
    """A connection, and from the end of its request on the rank that was forked for it."""

    connection: socket.socket
    deadline: float
    words: bytearray = field(default_factory=bytearray)
    memory: int = -1
    pid: int = -1
    pidfd: int = -1
    is_gone: bool = False


class Zygote:
    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        Path(path).unlink(missing_ok=True)
        self._listener.bind(path)
        self._listener.listen()
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._asking: dict[_Asker, None] = {}  # those without a rank, the oldest first

    def run(self) -> None:
        """For ever; one turn per event. Nothing in it waits for a peer."""
        while True:
            for key, _ in self._selector.select(self._patience()):
                asker: _Asker | None = key.data
                if asker is None:
                    self._accept()
                elif key.fileobj is asker.connection:
                    if not asker.is_gone:
                        self._heard(asker)
                else:
                    self._child_ended(asker)
            while self._asking and (oldest := next(iter(self._asking))).deadline <= time.monotonic():
                self._refuse(oldest, f"nothing asked within {REQUEST_S:.0f} s")

    def _patience(self) -> float | None:
        return max(0.0, next(iter(self._asking)).deadline - time.monotonic()) if self._asking else None

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptor left
            if self._asking:
                self._refuse(next(iter(self._asking)), str(error))
            else:
                time.sleep(CROWDED_S)
            return
        connection.setblocking(False)
        asker = _Asker(connection, time.monotonic() + REQUEST_S)
        self._asking[asker] = None
        self._selector.register(connection, selectors.EVENT_READ, asker)

    def _heard(self, asker: _Asker) -> None:
        if asker.pid >= 0:
            self._drop(asker)
            return
        try:
            if not self._read(asker):
                return
            if asker.words == PING:
                self._answer_ping(asker)
            else:
                self._fork(asker, *_parse(asker.words))
        except BlockingIOError:
            return
        except (OSError, _BadRequest) as error:
            self._refuse(asker, str(error))

    def _answer_ping(self, asker: _Asker) -> None:
        """Answer a liveness check."""
        _tell(asker, pid=os.getpid())
        del self._asking[asker]
        self._close_memory(asker)
        self._drop(asker)

    def _read(self, asker: _Asker) -> bool:
        """Whether the request is whole."""
        data, fds, _, _ = socket.recv_fds(asker.connection, MAX_REQUEST_BYTES, 1)
        for fd in fds:
            if asker.memory < 0:
                asker.memory = fd
            else:
                os.close(fd)
        if not data:
            raise _BadRequest("it ended")
        asker.words += data
        if len(asker.words) > MAX_REQUEST_BYTES:
            raise _BadRequest(f"longer than {MAX_REQUEST_BYTES} bytes")
        return b"\n" in data

    def _fork(self, asker: _Asker, spec: str, rank: int) -> None:
        if asker.memory < 0:
            raise _BadRequest("no memory came with it")
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._be_rank(parent, asker.memory, spec, rank)
        try:
            asker.pidfd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        asker.pid = pid
        del self._asking[asker]
        self._close_memory(asker)
        self._selector.register(asker.pidfd, selectors.EVENT_READ, asker)
        if not _tell(asker, pid=pid):
            self._drop(asker)

    def _be_rank(self, parent: int, memory: int, spec: str, rank: int) -> None:
        """In the child, which never leaves this function."""
        status = 1
        try:
            die_with_parent(parent)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._forget_all(memory)
            serve(load_spec(Path(spec)), rank, memory)
            status = 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _forget_all(self, memory: int) -> None:
        for asker in self._asking:
            if asker.memory not in (-1, memory):
                os.close(asker.memory)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            else:
                os.close(key.fd)
        self._selector.close()

    def _refuse(self, asker: _Asker, why: str) -> None:
        """Of one that has no rank."""
        with contextlib.suppress(OSError):
            print(f"zygote: bad request: {why}", file=sys.stderr, flush=True)
        del self._asking[asker]
        self._close_memory(asker)
        self._drop(asker)

    def _drop(self, asker: _Asker) -> None:
        """The end of a connection; its rank, if it has one, is reaped in its own turn."""
        asker.is_gone = True
        self._selector.unregister(asker.connection)
        asker.connection.close()
        if asker.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(asker.pidfd, signal.SIGKILL)

    def _child_ended(self, asker: _Asker) -> None:
        _, status = os.waitpid(asker.pid, 0)
        self._selector.unregister(asker.pidfd)
        os.close(asker.pidfd)
        asker.pidfd = -1
        if not asker.is_gone:
            _tell(asker, exit=os.waitstatus_to_exitcode(status))
            self._drop(asker)

    @staticmethod
    def _close_memory(asker: _Asker) -> None:
        if asker.memory >= 0:
            os.close(asker.memory)
            asker.memory = -1


def _parse(words: bytearray) -> tuple[str, int]:
    """Raises _BadRequest. The spec itself is read in the child: it may be anything."""
    try:
        request = json.loads(words)
    except (ValueError, RecursionError) as error:
        raise _BadRequest(str(error)) from error
    if not isinstance(request, dict):
        raise _BadRequest("no JSON object")
    spec, rank = request.get("spec"), request.get("rank")
    if not isinstance(spec, str) or not isinstance(rank, int) or rank < 0:
        raise _BadRequest("spec must be a path and rank a number from 0 on")
    return spec, rank


def _tell(asker: _Asker, **fields: int) -> bool:
    """Two short lines always fit into the socket. False: the other end is gone."""
    try:
        asker.connection.sendall(json.dumps(fields).encode() + b"\n")
    except OSError:
        return False
    return True


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m sluice_engine.rank.zygote")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args(argv)
    die_with_parent(args.parent)
    drop_what_nobody_reads()
    raise_limit()
    # A terminal's Ctrl-C goes to the whole group, ranks too; the supervisor decides which process ends, and when.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    import sluice_engine.rank.runner  # noqa: F401

    torch.set_num_threads(1)
    answer_with_stacks(Path(args.socket).parent, "zygote")
    zygote = Zygote(args.socket)
    say("zygote-ready", pid=os.getpid())
    zygote.run()


if __name__ == "__main__":
    main()
