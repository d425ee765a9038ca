"""Operators without the seconds that each would need to import its libraries: forked from a process that has them.

Run as a program it serves orders, a JSON object a line: {"start": arguments, "log": path} -> {"pid": 1}, and
{"poll": pid} -> {"status": null or its exit status, negative for a signal}. It ends with its input, and what it has
forked ends with it. It has no thread and no event loop; each operator makes its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path

PR_SET_PDEATHSIG = 1


class Forge:
    """The other end, for the process that runs tests. One order at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def start(self, arguments: list[str], log: Path) -> int:
        """The pid of an operator, a grandchild of ours."""
        return int(self._order({"start": arguments, "log": str(log)})["pid"])

    def poll(self, pid: int) -> int | None:
        status: int | None = self._order({"poll": pid})["status"]
        return status

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate(timeout=20)
            self._process = None

    def _order(self, told):
        with self._lock:
            if self._process is None:
                command = [sys.executable, __file__]
                self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(told) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            assert answer, "the forge has ended"
            return json.loads(answer)


def serve(orders, answers):
    ended: dict[int, int] = {}
    for line in orders:
        told = json.loads(line)
        if "start" in told:
            answer = {"pid": _fork(told["start"], told["log"])}
        else:
            pid = told["poll"]
            if pid not in ended:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    ended[pid] = os.waitstatus_to_exitcode(status)
            answer = {"status": ended.get(pid)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _fork(arguments, log):
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        _die_with(parent)
        _redirect(log)
        status = run(arguments)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _die_with(parent):
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _redirect(log):
    """The pipes to whoever gives orders are the forge's alone."""
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, descriptor in ((nothing, 0), (target, 1), (target, 2)):
        os.dup2(source, descriptor)
    os.close(target)
    os.close(nothing)


if __name__ == "__main__":
    from kwok_fleet import run

    _die_with(os.getppid())
    serve(sys.stdin, sys.stdout)
