"""What a child wrote to stderr before it died is in the cause, bounded, and without secrets or prompts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_runtime.health.last_words import MAX_BYTES, cause_of_death


def traceback(last: str) -> list[str]:
    return [
        "some line of a log",
        "Traceback (most recent call last):",
        '  File "/app/x.py", line 1, in <module>',
        "    answer(prompt)",
        last,
    ]


@pytest.mark.parametrize(
    ("last", "told"),
    [
        ("ModuleNotFoundError: No module named 'uvicorn'", "ModuleNotFoundError: No module named 'uvicorn'"),
        ("ImportError: libfoo.so.1: cannot open", "ImportError: libfoo.so.1: cannot open"),
        ("PermissionError: [Errno 13] denied: '/etc/key'", "PermissionError: [Errno 13] denied: '/etc/key'"),
        ("ValueError: my secret prompt", "ValueError"),
        ("sluice_gateway.openai.errors.Odd: my secret prompt", "sluice_gateway.openai.errors.Odd"),
        ("KeyError", "KeyError"),
    ],
)
def test_of_a_process_that_holds_prompts_only_the_kind_of_an_error_is_told(last: str, told: str) -> None:
    assert cause_of_death(traceback(last), holds_prompts=True) == told


def test_of_any_other_process_the_error_is_told_whole() -> None:
    assert cause_of_death(traceback("ValueError: pages is 0"), holds_prompts=False) == "ValueError: pages is 0"


def test_a_process_that_holds_prompts_tells_nothing_but_an_error() -> None:
    assert cause_of_death(["my secret prompt"], holds_prompts=True) == ""
    fatal = "Fatal Python error: Segmentation fault"
    assert cause_of_death([fatal, "", "Current thread 0x1:"], holds_prompts=True) == fatal


def test_the_last_of_several_tracebacks_counts() -> None:
    lines = [*traceback("ValueError: first"), "", "During handling ...", *traceback("OSError: second")]
    assert cause_of_death(lines, holds_prompts=True) == "OSError: second"


def test_native_code_is_quoted_by_its_last_lines() -> None:
    lines = [
        "E1 config.cpp:84] Invalid UCX_TLS=tcp: NVIDIA GPU(s) are present",
        "E1 agent.cpp:342] createBackend failed",
    ]
    assert cause_of_death(lines, holds_prompts=False) == " | ".join(lines)


@pytest.mark.parametrize(
    ("line", "secret"),
    [
        ("connect to http://user:pa55@hub.example/x", "pa55"),
        ("header Authorization: Bearer abc.def-123", "abc.def-123"),
        ("token hf_ABCdef123 was refused", "hf_ABCdef123"),
        ("the key is 0123456789abcdef", "0123456789abcdef"),
        ("GET https://hub.example/y?token=tok3n", "tok3n"),
    ],
)
def test_secrets_are_taken_out(line: str, secret: str) -> None:
    told = cause_of_death([line], ["0123456789abcdef", ""], holds_prompts=False)
    assert told
    assert secret not in told


@given(st.lists(st.text(), max_size=30), st.booleans())
def test_whatever_was_written_is_one_printable_bounded_line(lines: list[str], holds_prompts: bool) -> None:
    told = cause_of_death(lines, holds_prompts=holds_prompts)
    assert len(told.encode()) <= MAX_BYTES
    assert told == "" or told.isprintable()
