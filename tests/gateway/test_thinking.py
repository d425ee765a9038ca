"""Whether and how hard the model thinks: what the checkpoint supports is read from the encoder that came with it."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from sluice_gateway.__main__ import make_settings, parse_arguments
from sluice_gateway.memory import MemoryEngine
from sluice_gateway.openai.errors import ApiError
from sluice_gateway.openai.requests import ChatRequest, Limits, parse_chat
from sluice_gateway.text.encoders import ENCODER, FINAL, KNOWN, PREVIEW, SCRIPTED, Efforts, Encoder, efforts_of
from sluice_protocol.generate import Role

# Written as DeepSeek's files write them, with shorter texts.
PREVIEW_FILE = """
raise RuntimeError("a checkpoint's Python is never executed")
thinking_end_token: str = "</think>"
assistant_msg_template: str = "{content}" + thinking_end_token
REASONING_EFFORT_MAX = (
    "Effort: maximum.\\n"
    "Be thorough — always.\\n\\n"
)
"""
FINAL_FILE = """
raise RuntimeError("a checkpoint's Python is never executed")
REASONING_EFFORT_PROMPTS: Dict[str, str] = {
    "low": "",
    "high": (
        "Effort: maximum.\\n"
        "Be thorough.\\n\\n"
    ),
    "max": "Effort: beyond maximum.\\n\\n",
}
DEFAULT_REASONING_EFFORT = "low"
"""


def checkpoint(directory: Path, source: str, encoder: Encoder | None) -> Efforts:
    """Of a checkpoint with this encoding file, which is known as `encoder`."""
    path = directory / ENCODER
    path.parent.mkdir()
    path.write_text(source, encoding="utf-8")
    return efforts_of(str(directory), {} if encoder is None else {sha256(source.encode()).hexdigest(): encoder})


def asked(efforts: Efforts, **fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields
    return parse_chat(body, Limits(512, 4096, efforts=efforts.paragraphs))


def test_final_checkpoints_have_three_tiers_with_paragraphs_of_their_own(tmp_path: Path) -> None:
    efforts = checkpoint(tmp_path, FINAL_FILE, FINAL)
    assert efforts.trouble == ""
    high, most = "Effort: maximum.\nBe thorough.\n\n", "Effort: beyond maximum.\n\n"
    expected = {"minimal": "", "low": "", "medium": high, "high": high, "xhigh": most, "max": most}
    for name, first in expected.items():
        for fields in ({"reasoning_effort": name}, {"chat_template_kwargs": {"reasoning_effort": name}}):
            request = asked(efforts, **fields)
            assert (request.thinking, request.first) == (True, first), name


def test_the_preview_has_a_paragraph_for_max_only(tmp_path: Path) -> None:
    efforts = checkpoint(tmp_path, PREVIEW_FILE, PREVIEW)
    for name in ("minimal", "low", "medium", "high"):
        assert asked(efforts, reasoning_effort=name).first == ""
    for name in ("xhigh", "max"):
        assert asked(efforts, reasoning_effort=name).first == "Effort: maximum.\nBe thorough — always.\n\n"


def test_the_published_encoders_are_known_by_their_digests() -> None:
    assert {digest[:8]: encoder.name for digest, encoder in KNOWN.items()} == {
        "bdbd57c1": "preview",
        "abc0d261": "final",
    }
    assert all(len(bytes.fromhex(digest)) == 32 for digest in KNOWN)


@pytest.mark.parametrize("source", [PREVIEW_FILE, "not Python at all (", "", "x = 1\n" * 200_000])
def test_of_an_unknown_encoder_no_effort_can_be_chosen(tmp_path: Path, source: str) -> None:
    efforts = checkpoint(tmp_path, source, None)
    assert str(tmp_path / ENCODER) in efforts.trouble
    for name in ("minimal", "low", "high", "max"):
        with pytest.raises(ApiError, match="not one that this gateway knows") as refused:
            asked(efforts, reasoning_effort=name)
        assert refused.value.param == "reasoning_effort"
    assert not asked(efforts, reasoning_effort="none").thinking
    assert asked(efforts, thinking={"type": "enabled"}).thinking


def test_an_encoder_without_the_texts_that_it_should_have_is_unknown_too(tmp_path: Path) -> None:
    assert "REASONING_EFFORT_MAX" in checkpoint(tmp_path, FINAL_FILE, PREVIEW).trouble


def test_the_gateway_warns_at_its_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = make_settings(parse_arguments(["--model-name", "m", "--tokenizer", str(tmp_path)]))
    assert settings.efforts.paragraphs == {}
    assert "reasoning_effort" in caplog.text
    assert str(tmp_path / ENCODER) in caplog.text
    caplog.clear()
    assert make_settings(parse_arguments(["--model-name", "m", "--tokenizer", "bytes"])).efforts == SCRIPTED
    assert caplog.text == ""


def test_a_tier_that_the_checkpoint_lacks_is_refused_by_name() -> None:
    with pytest.raises(ApiError, match='no effort "max"; send one of "none", "minimal", "low", "medium", "high"'):
        asked(SCRIPTED, reasoning_effort="max")


ON: list[dict[str, Any]] = [
    {"thinking": {"type": "enabled"}},
    {"thinking": {"type": "enabled"}, "reasoning_effort": "none"},
    {"chat_template_kwargs": {"thinking": True}},
    {"chat_template_kwargs": {"enable_thinking": True, "thinking": None}},
    {"chat_template_kwargs": {"reasoning_effort": "low"}, "reasoning_effort": "none"},
]
OFF: list[dict[str, Any]] = [
    {},
    {"thinking": None},
    {"thinking": {"type": "disabled"}, "reasoning_effort": "high"},
    {"chat_template_kwargs": {"thinking": False}, "reasoning_effort": "high"},
    {"chat_template_kwargs": {"reasoning_effort": "none"}, "reasoning_effort": "high"},
]


@pytest.mark.parametrize(("fields", "is_on"), [*((one, True) for one in ON), *((one, False) for one in OFF)])
def test_a_switch_wins_over_an_effort_and_without_any_it_is_off(fields: dict[str, Any], is_on: bool) -> None:
    assert asked(SCRIPTED, **fields).thinking is is_on


def test_an_effort_says_nothing_where_the_model_does_not_think(tmp_path: Path) -> None:
    efforts = checkpoint(tmp_path, FINAL_FILE, FINAL)
    assert asked(efforts, reasoning_effort="max", thinking={"type": "disabled"}).first == ""
    assert asked(efforts, thinking={"type": "enabled"}, reasoning_effort="max").first != ""


async def test_the_paragraph_stands_right_behind_the_first_marker(start: Any) -> None:
    engine = MemoryEngine(Role.UNIFIED, lambda _prompt, _position: 257)
    stack = await start({"u": engine}, efforts=Efforts({"high": "Go."}))
    assert (await stack.chat(reasoning_effort="high")).status_code == 200
    assert engine.requests[0].prompt_ids == (256, *b"Go.", 258, *b"hi", 259, 260)
