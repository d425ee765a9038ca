"""Finding stop strings, whatever the pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sluice_gateway.openai.stops import StopScanner

texts = st.text("ab", max_size=30)
strings = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


def first_end(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Brute force: the match that ends first, of those the longest, as (start, string)."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return end - len(longest), longest
    return None


def feed(parts: list[str], stops: tuple[str, ...]) -> tuple[str, str | None, str]:
    """(shown text, match, text after the match)."""
    scanner = StopScanner(stops)
    shown = ""
    for index, part in enumerate(parts):
        scanned = scanner.push(part)
        shown += scanned.text
        if scanned.matched is not None:
            return shown, scanned.matched, scanned.rest + "".join(parts[index + 1 :])
    return shown + scanner.held, None, ""


@given(texts, strings, st.data())
def test_pieces_do_not_matter(text: str, stops: tuple[str, ...], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    expected = first_end(text, stops)
    if expected is None:
        assert feed(parts, stops) == (text, None, "")
    else:
        start, stop = expected
        assert feed(parts, stops) == (text[:start], stop, text[start + len(stop) :])


@given(texts, strings)
def test_exactly_what_may_become_a_match_is_held(text: str, stops: tuple[str, ...]) -> None:
    scanner = StopScanner(stops)
    shown = ""
    for char in text:
        scanned = scanner.push(char)
        shown += scanned.text
        if scanned.matched is not None:
            break
        whole = shown + scanner.held
        starts = [k for stop in stops for k in range(1, len(stop)) if whole.endswith(stop[:k])]
        assert len(scanner.held) == max(starts, default=0)


def test_text_is_held_only_while_a_stop_may_be_starting() -> None:
    scanner = StopScanner(("STOP",))
    assert [scanner.push(c).text for c in "aSTxSTO"] == ["a", "", "", "STx", "", "", ""]
    assert scanner.held == "STO"
