"""Tokens that come together go out together: one write, an event each."""

from __future__ import annotations

import orjson
from hypothesis import given
from hypothesis import strategies as st

from sluice_gateway.openai.frames import ChatFrames, Identity
from sluice_gateway.openai.sinks import CollectSink, StreamSink
from sluice_gateway.text.detokenize import Pieces
from sluice_gateway.text.tokenizer import ByteTokenizer
from sluice_gateway.text.track import Track, TrackPlan
from sluice_protocol.outputs import OutputLimit

TOKENIZER = ByteTokenizer()
STOP = ord("!")


def track(writes: list[bytes], max_tokens: int = 100, stop: tuple[str, ...] = ()) -> Track:
    frames = ChatFrames(Identity("id", 1, "m", "fp"), 0, TOKENIZER)
    plan = TrackPlan(OutputLimit(frozenset({STOP}), max_tokens), stop)
    return Track(plan, Pieces(TOKENIZER), StreamSink(frames, writes.append))


def choices(data: bytes) -> list[tuple[str | None, str | None]]:
    """(content, finish_reason) of each event."""
    events = [orjson.loads(event.removeprefix(b"data: ")) for event in data.split(b"\n\n") if event]
    return [(e["choices"][0]["delta"].get("content"), e["choices"][0]["finish_reason"]) for e in events]


def test_tokens_that_come_together_are_one_write_and_an_event_each() -> None:
    writes: list[bytes] = []
    one = track(writes)
    one.push(list(b'ab"'))  # learned one by one
    writes.clear()
    assert not one.push(list(b'b"a'))
    assert [choices(data) for data in writes] == [[("b", None), ('"', None), ("a", None)]]


def test_what_came_before_the_end_goes_out_before_it() -> None:
    writes: list[bytes] = []
    one = track(writes)
    one.push(list(b"ab"))
    writes.clear()
    one.push([*b"ab", STOP, *b"ab"])
    assert choices(b"".join(writes)) == [("a", None), ("b", None), (None, "stop")]
    assert one.output_ids == [*b"abab", STOP]


def test_a_stop_token_whose_text_is_known_stops_all_the_same() -> None:
    writes: list[bytes] = []
    one = track(writes)
    one._json[STOP] = b"!"  # another request, which did not stop there, has learned it
    one.push([STOP])
    assert one.finished == "stop"
    assert choices(b"".join(writes)) == [("", None), (None, "stop")]


@given(
    st.lists(st.sampled_from([*'abc"é€!'.encode()]), max_size=20),
    st.lists(st.integers(1, 5), min_size=20, max_size=20),
    st.integers(1, 25),
    st.sampled_from([(), ("bc",)]),
)
def test_how_tokens_are_grouped_changes_no_event(
    tokens: list[int], sizes: list[int], max_tokens: int, stop: tuple[str, ...]
) -> None:
    alone: list[bytes] = []
    grouped: list[bytes] = []
    one, other = track(alone, max_tokens, stop), track(grouped, max_tokens, stop)
    for token in tokens:
        if one.push([token]):
            break
    at = 0
    for size in sizes:
        if other.push(tokens[at : at + size]):
            break
        at += size
    assert b"".join(grouped) == b"".join(alone)
    assert (one.finished, one.output_ids) == (other.finished, other.output_ids)


def test_a_collected_answer_has_all_of_them() -> None:
    sink = CollectSink()
    sink.pieces([b"a", b'\\"', b"b"])
    assert sink.content == 'a"b'


END_THINK = TOKENIZER.markers["</think>"]


def collected(tokens: list[int], stop: tuple[str, ...] = ()) -> tuple[str, str, int]:
    """(reasoning, content, reasoning tokens) of an answer that begins with reasoning."""
    sink = CollectSink()
    plan = TrackPlan(OutputLimit(frozenset({STOP}), 100), stop, END_THINK)
    one = Track(plan, Pieces(TOKENIZER), sink)
    for token in tokens:
        if one.push([token]):
            break
    return sink.reasoning, sink.content, one.reasoning_tokens


def test_reasoning_ends_with_the_marker_token_and_not_with_its_characters() -> None:
    assert collected([*b"a</think>b", END_THINK, *b"c"]) == ("a</think>b", "c", 11)
    assert collected([*b"never ends"]) == ("never ends", "", 10)
    assert collected([END_THINK, *b"at once"]) == ("", "at once", 1)


def test_a_marker_in_the_content_is_text() -> None:
    assert collected([END_THINK, *b"a", END_THINK, *b"b"]) == ("", "a</think>b", 1)


def test_an_unfinished_character_before_the_marker_belongs_to_the_reasoning() -> None:
    assert collected([*"é".encode()[:1], END_THINK, *b"x"]) == ("\ufffd", "x", 2)


def test_a_stop_string_is_looked_for_after_the_marker_only() -> None:
    assert collected([*b"no", END_THINK, *b"yes no more"], ("no",)) == ("no", "yes ", 3)
