"""The scripted model's content: a chunk at once is what its tokens are one by one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_engine.rank.scripted import after, after_each

words = st.integers(0, 2**64 - 1)


@given(words, st.integers(0, 2**40), st.lists(st.integers(0, 2**31), min_size=1, max_size=300))
@settings(max_examples=60, deadline=None)
def test_a_chunk_is_its_tokens_one_after_the_other(content: int, position: int, tokens: list[int]) -> None:
    wanted, last = [], content
    for place, token in enumerate(tokens, position):
        last = after(last, place, token)
        wanted.append(last)
    assert after_each(content, position, tokens).tolist() == wanted


@given(words, st.integers(0, 2**20), st.integers(0, 2**31), st.integers(1, 2**31))
@settings(max_examples=60, deadline=None)
def test_another_token_or_place_or_content_makes_another_content(
    content: int, position: int, token: int, by: int
) -> None:
    here = after(content, position, token)
    assert after(content ^ by, position, token) != here
    assert after(content, position + by, token) != here
    assert after(content, position, token + by) != here
