"""A process that has imported torch and nothing else that owns threads; ranks are forked from it.

On its Unix socket: one connection per rank. The asker sends a JSON line {"spec": path, "rank": n} with the memory's
file descriptor, gets {"pid": n}, and when that rank has ended {"exit": status} and the end of the stream. The end of
the connection on the asker's side ends the rank.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from sluice_engine.processes import die_with_parent
from sluice_engine.rank import serve
from sluice_engine.spec import load_spec


@dataclass(slots=True)
class _Child:
    pid: int
    pidfd: int
    connection: socket.socket


class Zygote:
    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        Path(path).unlink(missing_ok=True)
        self._listener.bind(path)
        self._listener.listen()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)

    def run(self) -> None:
        """For ever; one turn per event."""
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._fork()
                elif key.fileobj is key.data.connection:
                    self._asker_gone(key.data)
                else:
                    self._child_ended(key.data)

    def _fork(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(10)
        try:
            data, fds, _, _ = socket.recv_fds(connection, 65536, 1)
            request = json.loads(data)
            spec, rank, memory = load_spec(Path(request["spec"])), int(request["rank"]), fds[0]
        except (OSError, ValueError, KeyError, IndexError) as error:
            print(f"zygote: bad request: {error}", file=sys.stderr, flush=True)
            connection.close()
            return
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_rank(parent)
            connection.close()
            try:
                serve(spec, rank, memory)
            except SystemExit as error:
                os._exit(int(error.code or 0))
            os._exit(0)
        os.close(memory)
        child = _Child(pid, os.pidfd_open(pid), connection)
        connection.sendall(json.dumps({"pid": pid}).encode() + b"\n")
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        self._selector.register(connection, selectors.EVENT_READ, child)

    def _become_rank(self, parent: int) -> None:
        die_with_parent(parent)
        for sig in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sig, signal.SIG_DFL)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            else:
                os.close(key.fd)
        self._selector.close()

    def _asker_gone(self, child: _Child) -> None:
        signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
        self._selector.unregister(child.connection)

    def _child_ended(self, child: _Child) -> None:
        _, status = os.waitpid(child.pid, 0)
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        if child.connection in {key.fileobj for key in self._selector.get_map().values()}:
            self._selector.unregister(child.connection)
            try:
                child.connection.sendall(json.dumps({"exit": os.waitstatus_to_exitcode(status)}).encode() + b"\n")
            except OSError:
                pass  # the asker went at the same moment
        child.connection.close()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m sluice_engine.zygote")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args(argv)
    die_with_parent(args.parent)
    import torch

    import sluice_engine.runner  # noqa: F401

    torch.set_num_threads(1)
    zygote = Zygote(args.socket)
    print(json.dumps({"event": "zygote-ready", "pid": os.getpid()}), flush=True)
    zygote.run()


if __name__ == "__main__":
    main()
