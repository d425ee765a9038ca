"""What follows `sluice` on a command line. Importing this takes a while: `__main__` does so ready for Ctrl-C."""

from __future__ import annotations

import argparse
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from sluice_cli import chaos, chat, doctor, plan, size, status, up

COMMANDS: dict[str, tuple[ModuleType, str]] = {
    "up": (up, "start gateway, prefill and decode on this machine"),
    "chat": (chat, "talk to a running `sluice up` from the terminal"),
    "status": (status, "show what runs, who is stuck, queues, rooms and caches"),
    "doctor": (doctor, "say what was wrong with a service that died or froze"),
    "size": (size, "say what a model's caches weigh, and what fits"),
    "plan": (plan, "say what the operator would do with a ModelDeployment, without a cluster"),
    "chaos": (chaos, "break it on purpose: the fault matrix, storms of clients that go away"),
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sluice", description="Disaggregated serving of DeepSeek-V4-class models")
    parser.add_argument("--version", action="version", version=f"sluice {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=summary, description=module.__doc__))
    return parser


def _version() -> str:
    try:
        return version("sluice-serve")
    except PackageNotFoundError:
        return "unknown (not installed)"
