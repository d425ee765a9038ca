"""The README, word by word, over the trained default model; and the death of what its ranks are forked from."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
ANSWER = "The code of amber falcon is 4719."

pytestmark = [pytest.mark.process, pytest.mark.timeout(110)]


@pytest.fixture(scope="module")
def stack(up_of_module) -> Iterator[object]:
    one = up_of_module("--ask-sample")
    one.wait("Ctrl-C stops it", limit_s=90)
    yield one
    assert one.interrupt() == 0


def block(language: str, word: str) -> str:
    """The README's block of that language with that word in it."""
    found = [text for text in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if word in text]
    assert len(found) == 1
    return found[0]


def test_the_sample_question_is_answered_and_its_way_told(stack):
    assert f"recall-1m: {ANSWER}" in stack.lines
    chunks = int(stack.wait(r"prefill  pid \d+: \d+ tokens in (\d+) chunks")[1])
    records = int(stack.wait(r"handoff  (\d+) records, [0-9,]+ bytes pulled over nixl")[1])
    assert chunks >= 3
    assert records >= 8


def test_the_readmes_curl(stack):
    if not shutil.which("curl"):
        pytest.skip("no curl here")
    command = block("sh", "curl -sN").replace("http://127.0.0.1:8000", stack.url)
    told = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True).stdout
    assert "".join(re.findall(r'"content":"(.*?)"', told)) == ANSWER


def test_the_readmes_openai_client(stack):
    code = block("python", "from openai import OpenAI").replace("http://127.0.0.1:8000", stack.url)
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert told.returncode == 0, told.stderr
    assert told.stdout == f"{ANSWER}\n"


def test_chat_finds_it_and_remembers_what_it_was_told(stack):
    told = stack.sluice("chat", "The code of amber falcon is 4719. What is the code of amber falcon?")
    assert (told.returncode, told.stdout) == (0, f"{ANSWER}\n")
    notes = "You keep the notes. The code of amber falcon is 4719. The code of quiet otter is 3140."
    typed = "What is the code of quiet otter?\nWhat is the code of amber falcon?\n"
    told = stack.sluice("chat", "--url", f"{stack.url}/v1", "--system", notes, typed=typed)
    assert told.stdout == f"The code of quiet otter is 3140.\n{ANSWER}\n"


def test_the_zygotes_death_takes_the_ranks_and_all_come_back(stack):
    before = stack.kill("sluice_engine.rank.zygote")
    for name in ("zygote", "prefill-0", "decode-0"):
        stack.wait(f"{name} died", start=before)
        stack.wait(f"{name} is ready", start=before, limit_s=90)
    stack.wait("serving again: http", start=before)
    told = stack.sluice("chat", "The code of amber falcon is 4719. What is the code of amber falcon?")
    assert (told.returncode, told.stdout) == (0, f"{ANSWER}\n")


def test_a_zygote_that_is_stuck_while_a_rank_is_wanted_is_replaced(stack):
    """It stops, and nobody minds, until an engine that died waits for its new rank; the other engine goes on."""
    zygote = stack.service("sluice_engine.rank.zygote")
    os.kill(zygote, signal.SIGSTOP)
    before = stack.kill("sluice_decode")
    stack.wait(r"zygote: it does not answer: .*another one is started", start=before, limit_s=90)
    for name in ("zygote", "decode-0"):
        stack.wait(f"{name} is ready", start=before, limit_s=90)
    stack.wait("serving again: http", start=before)
    told = stack.sluice("chat", "The code of amber falcon is 4719. What is the code of amber falcon?")
    assert (told.returncode, told.stdout) == (0, f"{ANSWER}\n")


def test_weights_that_do_not_fit_are_named_and_everything_is_stopped(up, tmp_path):
    from safetensors.numpy import load_file, save_file

    from sluice_cli.default_model import default_model

    shutil.copytree(default_model(), tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    lost = sorted(tensors)[0]
    del tensors[lost]
    save_file(tensors, path)
    one = up("--model", str(tmp_path / "model"))
    assert one.end() == 1
    assert "did not start" in one.text
    assert lost in one.text
