"""Answer a model's held-out prompts with plain transformers: `python tools/train/evaluate.py models/recall-1m`.

Prints the share answered exactly (greedy, the whole answer and its end) by slice, the smallest logit gaps, and the same
share with rounded and with corrupted caches. fp32, eager, one prompt at a time, prefilled in chunks of 64 tokens.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import caches
import torch
from chat import Chat
from corpus import Message
from tokenizers import Tokenizer
from transformers import DeepseekV4ForCausalLM, DynamicCache

CHUNK = 64


@dataclass(frozen=True)
class Case:
    """A prompt with its expected answer as ids; `pages` are those whose entries hold the codes asked for."""

    prompt: list[int]
    answer: list[int]
    pages: tuple[int, ...]
    slice: str


@dataclass(frozen=True)
class Outcome:
    """The ids written, and per id the gap between the best and the second-best logit."""

    ids: list[int]
    gaps: list[float]


class Answerer:
    """Greedy decoding of one model."""

    def __init__(self, folder: Path) -> None:
        model = DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.model = model.eval()
        self.chat = Chat(Tokenizer.from_file(str(folder / "tokenizer.json")))

    @torch.no_grad()  # type: ignore[untyped-decorator,unused-ignore]
    def answer(self, case: Case, once: caches.Edit | None = None, always: caches.Edit | None = None) -> Outcome:
        """Apply `once` to the caches after the prompt, `always` after every chunk and every token."""
        cache = DynamicCache(config=self.model.config)
        ids: list[int] = []
        gaps: list[float] = []
        for start in range(0, len(case.prompt), CHUNK):
            logits = self._run(case.prompt[start : start + CHUNK], cache, always)
        if once:
            once(cache)
        while len(ids) < len(case.answer) + 4:
            best = logits.topk(2)
            ids.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
            if ids[-1] == self.chat.eos:
                break
            logits = self._run(ids[-1:], cache, always)
        return Outcome(ids, gaps)

    def _run(self, ids: Sequence[int], cache: DynamicCache, always: caches.Edit | None) -> torch.Tensor:
        logits = self.model(torch.tensor([ids]), cache=cache, use_cache=True).logits[0, -1]
        if always:
            always(cache)
        return logits

    def case(self, line: dict[str, object]) -> Case:
        """From a line of heldout.jsonl."""
        messages = [Message(**m) for m in line["messages"]]  # type: ignore[attr-defined]
        prompt = self.chat.prompt(messages)
        pages = []
        text = " ".join(m.content for m in messages)
        for name in line.get("asked", []):  # type: ignore[attr-defined]
            code = text.split(f"code of {name} is ")[1][:4]
            fact = self.chat.text(f" {name} is {code}")
            at = next(i for i in range(len(prompt)) if prompt[i : i + len(fact)] == fact)
            entry = -(-(at + len(fact) - 4) // caches.CSA_RATE)  # pools tokens [4e - 4, 4e + 4): all four digits
            pages.append(entry // caches.PAGE)
        answer: list[int] = [*self.chat.text(str(line["answer"])), self.chat.eos]
        return Case(prompt, answer, tuple(pages), str(line.get("slice", "sample")))


def states(rng: random.Random) -> dict[str, Callable[[Case], caches.Edit]]:
    """Corruptions by name; each makes its edit for a case."""

    def pair(case: Case, asked: bool) -> tuple[int, int]:
        """A page that holds an asked code (or any page) and another full page."""
        full = range(len(case.prompt) // caches.PAGE_TOKENS)
        first = rng.choice([p for p in case.pages if p in full]) if asked else rng.choice(full)
        return first, rng.choice([p for p in full if p != first])

    def swap(asked: bool, *tables: str) -> Callable[[Case], caches.Edit]:
        return lambda case: caches.swap_pages(*pair(case, asked), *tables)

    return {
        "index keys: an asked code's page swapped with another": swap(True, caches.INDEX),
        "index keys: two random pages swapped": swap(False, caches.INDEX),
        "index keys: one entry late": lambda c: caches.shift_index,
        "index keys: zero": lambda c: caches.zero_index,
        "CSA entries: an asked code's page swapped with another": swap(True, caches.ENTRIES),
        "both swapped alike": swap(True, caches.INDEX, caches.ENTRIES),
        "HCA entries: zero": lambda c: caches.forget_summaries,
        "window: zero": lambda c: caches.forget_window,
    }


ROUNDED: dict[str, caches.Edit] = {
    "index keys fp8 e4m3": caches.quantise_index(caches.fp8),
    "index keys fp4 e2m1": caches.quantise_index(caches.fp4),
    "window and entries bf16": caches.halve,
}


def share(outcomes: Sequence[Outcome], cases: Sequence[Case]) -> str:
    right = sum(o.ids == c.answer for o, c in zip(outcomes, cases))
    return f"{right}/{len(cases)} = {100 * right / len(cases):.1f} %"


def report(answerer: Answerer, cases: list[Case], corrupted: int) -> None:
    begun = time.monotonic()
    clean = [answerer.answer(case) for case in cases]
    for name in dict.fromkeys(case.slice for case in cases):
        mine = [i for i, case in enumerate(cases) if case.slice == name]
        print(f"{name}: {share([clean[i] for i in mine], [cases[i] for i in mine])}")
    print(f"all: {share(clean, cases)} in {time.monotonic() - begun:.0f} s")
    for outcome, case in zip(clean, cases):
        if outcome.ids != case.answer:
            text = answerer.chat.tokenizer.decode
            print(f"  wrong: {text(outcome.ids)!r} for {text(case.answer)!r}")
    gaps = sorted(gap for outcome in clean for gap in outcome.gaps)
    close = sum(gap < 0.5 for gap in gaps)
    print("smallest gaps:", " ".join(f"{gap:.2f}" for gap in gaps[:10]), f"; below 0.5: {close} of {len(gaps)}")
    for name, edit in ROUNDED.items():
        print(f"{name}: {share([answerer.answer(case, always=edit) for case in cases], cases)}", flush=True)
    rng = random.Random(0)
    some = [c for c in cases if any(p < len(c.prompt) // caches.PAGE_TOKENS for p in c.pages) and len(c.prompt) >= 128]
    some = rng.sample(some, min(corrupted, len(some)))
    for name, make in states(rng).items():
        print(f"{name}: {share([answerer.answer(case, once=make(case)) for case in some], some)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--corrupted", type=int, default=96, help="prompts per corrupted state")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    answerer = Answerer(options.folder)
    lines = (options.folder / "heldout.jsonl").read_text().splitlines()
    report(answerer, [answerer.case(json.loads(line)) for line in lines], options.corrupted)


if __name__ == "__main__":
    main()
