"""The `sluice` command."""

from __future__ import annotations

import argparse
import sys
from types import ModuleType

from sluice_cli import chat, size, up

COMMANDS: dict[str, tuple[ModuleType, str]] = {
    "up": (up, "start gateway, prefill and decode on this machine"),
    "chat": (chat, "talk to a running `sluice up` from the terminal"),
    "size": (size, "say what a model's caches weigh, and what fits"),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sluice", description="Disaggregated serving of DeepSeek-V4-class models")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=summary, description=module.__doc__))
    args = parser.parse_args(argv)
    try:
        return int(COMMANDS[args.command][0].run(args))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
