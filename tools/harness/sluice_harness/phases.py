"""Bringing a service into the middle of something, and knowing that it is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from sluice_faults import Action, Order, place, reached, withdraw
from sluice_harness.chat import Chat
from sluice_harness.rows import Phase
from sluice_harness.stack import Stack
from sluice_launch.process import Late, eventually

# No two prompts begin alike: a prefix that is cached is not prefilled again.
_numbers = count()


@dataclass
class Work:
    """What is under way. `undo`: what holds it there, to be taken away."""

    chats: list[Chat] = field(default_factory=list)
    undo: list[Callable[[], None]] = field(default_factory=list)

    def release(self) -> None:
        while self.undo:
            self.undo.pop()()


def enter(stack: Stack, phase: Phase) -> Work:
    """Raises Late."""
    work = Work()
    _ENTER[phase](stack, work)
    return work


def fresh_prompt(text: str) -> str:
    return f"{next(_numbers)}: {text}"


def hold(directory: Path, point: str, order: Order, work: Work) -> None:
    place(directory, point, order)
    work.undo.append(lambda: withdraw(directory, point))


def _idle(stack: Stack, work: Work) -> None:
    for engine in stack.engines.values():
        engine.settled()


def _prefilling(stack: Stack, work: Work) -> None:
    reader = stack.engine("prefill" if "prefill" in stack.profile.roles else "unified")
    work.chats.append(stack.chat(fresh_prompt(stack.profile.long_prompt), 40))
    eventually(lambda: reader.phase_count("prefilling"), "a prompt is prefilled")


def _pulling(stack: Stack, work: Work) -> None:
    """READs are held back as if the lane did not move; not those of a sidecar that is started later."""
    decode = stack.engine("decode")
    hold(decode.faults, "sidecar.complete", Order(Action.HOLD, pid=decode.pid("sidecar")), work)
    work.chats.append(stack.chat(fresh_prompt("to be pulled " * 8), 40))
    eventually(lambda: reached(decode.faults, "sidecar.complete"), "a READ is under way")


def _decoding(stack: Stack, work: Work) -> None:
    chat = stack.chat(fresh_prompt("count for me"), stack.profile.long_answer)
    work.chats.append(chat)
    eventually(lambda: len(chat.pieces) > 3 or chat.over.is_set(), "an answer streams")
    if chat.over.is_set():
        raise Late(f"the answer was over before the fault: {chat.error or chat.finish}")


def _queued(stack: Stack, work: Work) -> None:
    """All rows are taken, and some requests wait in the gateway."""
    rows = int(stack.profile.spec["max_running"])
    work.chats += [stack.chat(fresh_prompt("talk"), stack.profile.long_answer) for _ in range(rows + 3)]
    eventually(lambda: sum(bool(chat.pieces) for chat in work.chats) >= rows, "all rows decode")


_ENTER: dict[Phase, Callable[[Stack, Work], None]] = {
    Phase.IDLE: _idle,
    Phase.PREFILLING: _prefilling,
    Phase.PULLING: _pulling,
    Phase.DECODING: _decoding,
    Phase.QUEUED: _queued,
    # An engine that drains has something to finish; one that loads is brought about by the runner.
    Phase.DRAINING: _decoding,
    Phase.LOADING: _idle,
}
