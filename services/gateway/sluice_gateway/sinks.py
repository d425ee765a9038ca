"""Where a choice's text goes: into a stream of SSE events, or into one answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import orjson

from sluice_gateway.frames import Frames
from sluice_gateway.track import Shown


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

    def text(self, content: str, reasoning: str, shown: Sequence[Shown]) -> None:
        if self._opening is not None:
            self._open()
        self._write(self._frames.text(content, reasoning, shown))

    def finish(self, reason: str) -> None:
        if self._opening is not None:
            self._open()
        self._write(self._frames.finish(reason))


class CollectSink:
    """Keeps everything until somebody asks."""

    def __init__(self) -> None:
        self.shown: list[Shown] = []
        self.reason: str | None = None
        self._content: list[str] = []
        self._reasoning: list[str] = []

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    def pieces(self, insides: Sequence[bytes]) -> None:
        self._content.append(orjson.loads(b'"' + b"".join(insides) + b'"'))

    def text(self, content: str, reasoning: str, shown: Sequence[Shown]) -> None:
        self._content.append(content)
        self._reasoning.append(reasoning)
        self.shown.extend(shown)

    def finish(self, reason: str) -> None:
        self.reason = reason
