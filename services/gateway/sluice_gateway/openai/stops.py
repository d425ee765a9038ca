"""Finding a string in a text that arrives in pieces."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scanned:
    """`text` may be shown now; `matched` is the string that was found right after it, `rest` what followed that."""

    text: str
    matched: str | None = None
    rest: str = ""


class StopScanner:
    """The match that ends first wins, of those the longest. What may be the start of a match is held back.

    One Knuth-Morris-Pratt automaton per string: the cost per character does not depend on the strings' lengths.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._strings = strings
        self._failures = tuple(_failures(string) for string in strings)
        self._states = [0] * len(strings)
        self._held = ""

    @property
    def held(self) -> str:
        """Text that `push` has not returned yet."""
        return self._held

    def push(self, text: str) -> Scanned:
        buffer = self._held + text
        for at in range(len(self._held), len(buffer)):
            found = self._advance(buffer[at])
            if found is not None:
                self._held = ""
                return Scanned(buffer[: at + 1 - len(found)], found, buffer[at + 1 :])
        keep = len(buffer) - max(self._states, default=0)
        self._held = buffer[keep:]
        return Scanned(buffer[:keep])

    def _advance(self, char: str) -> str | None:
        found: str | None = None
        for index, string in enumerate(self._strings):
            state, failures = self._states[index], self._failures[index]
            while state and string[state] != char:
                state = failures[state - 1]
            state += string[state] == char
            self._states[index] = state
            if state == len(string):
                self._states[index] = 0
                found = string if found is None or len(string) > len(found) else found
        return found


def _failures(string: str) -> tuple[int, ...]:
    """Length of the longest proper prefix of string[:i + 1] that is also its suffix, for each i."""
    table = [0] * len(string)
    for at in range(1, len(string)):
        length = table[at - 1]
        while length and string[length] != string[at]:
            length = table[length - 1]
        table[at] = length + (string[length] == string[at])
    return tuple(table)
