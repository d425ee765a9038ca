"""A conversation as values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Speaker(StrEnum):
    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is the text that the model once wrote: JSON, or not."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """`reasoning` and `tool_calls` belong to an assistant, `tool_call_id` to a tool."""

    role: Speaker
    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""

    @property
    def characters(self) -> int:
        """Of all its text."""
        calls = sum(len(call.name) + len(call.arguments) for call in self.tool_calls)
        return len(self.text) + len(self.reasoning) + calls
