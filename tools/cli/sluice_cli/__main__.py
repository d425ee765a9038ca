"""The `sluice` command."""

from __future__ import annotations

import io
import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_usual:  # an import cannot always pass KeyboardInterrupt on
        signal.signal(signal.SIGINT, _end_at_once)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a terminal cannot show ends nothing
            stream.reconfigure(errors="backslashreplace")
    from sluice_cli.commands import COMMANDS, build_parser

    try:
        try:
            args = build_parser().parse_args(argv)
        finally:
            if is_usual:
                signal.signal(signal.SIGINT, signal.default_int_handler)
        return int(COMMANDS[args.command][0].run(args))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has gone, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _end_at_once(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
