"""Where a choice's text goes: into a stream of SSE events, or into one answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from sluice_gateway.openai.frames import Frames
from sluice_gateway.text.deltas import Delta, Part, Shown


class StreamSink:
    """Writes tokens' chunks at once; `write` takes whole events."""

    def __init__(self, frames: Frames, write: Callable[[bytes], None]) -> None:
        self._frames = frames
        self._write = write
        self._prefix = frames.prefix
        self._suffix = frames.suffix
        self._between = frames.suffix + frames.prefix
        self._opening: bytes | None = frames.opening()

    def _open(self) -> None:
        if self._opening:
            self._write(self._opening)
        self._opening = None

    def pieces(self, insides: Sequence[bytes]) -> None:
        """One write, whatever their number; an event each."""
        if self._opening is not None:
            self._open()
        self._write(self._prefix + self._between.join(insides) + self._suffix)

    def delta(self, delta: Delta) -> None:
        if self._opening is not None:
            self._open()
        self._write(self._frames.delta(delta))

    def finish(self, reason: str) -> None:
        if self._opening is not None:
            self._open()
        self._write(self._frames.finish(reason))


class CollectSink:
    """Keeps everything until the answer is made. `describe` makes the JSON of tokens' log-probabilities: done as they
    come, for those of a long answer together would keep the event loop for seconds."""

    def __init__(self, describe: Callable[[Sequence[Shown]], dict[str, Any]] | None = None) -> None:
        self._describe = describe
        self._described: dict[str, list[bytes]] = {}
        self.reason: str | None = None
        self._content: list[str] = []
        self._reasoning: list[str] = []

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def logprobs(self) -> dict[str, Any] | None:
        """As `describe` has it for all tokens together, for orjson; None without one."""
        if self._describe is None:
            return None
        made = {name: orjson.Fragment(b"[" + b",".join(parts) + b"]") for name, parts in self._described.items()}
        return self._describe(()) | made

    def pieces(self, insides: Sequence[bytes]) -> None:
        self._content.append(orjson.loads(b'"' + b"".join(insides) + b'"'))

    def delta(self, delta: Delta) -> None:
        (self._reasoning if delta.part is Part.REASONING else self._content).append(delta.text)
        if self._describe is not None and delta.shown:
            for name, value in self._describe(delta.shown).items():
                if isinstance(value, list):
                    self._described.setdefault(name, []).append(orjson.dumps(value)[1:-1])

    def finish(self, reason: str) -> None:
        self.reason = reason
