"""Train the default model: `python tools/train/train.py --out models/recall-1m --seed 0`.

Uses a GPU when there is one (each step is then a replay of a CUDA graph), else one CPU thread per `--threads`.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import curriculum
import tokenizer as vocabulary
import torch
from batches import Recipe, stream
from corpus import texts
from network import Network, Signals, Switches, configuration, initialise
from objective import objective
from phrases import ADJECTIVES, NOUNS
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

VOCABULARY = 640
BIAS_RATE = 1e-3


class Trainer:
    """Owns the optimizer and the switches of one model; `step` trains on one batch and returns its report."""

    def __init__(self, model: DeepseekV4ForCausalLM, device: torch.device, peak: float) -> None:
        self.network, self.device, self.peak = Network(model), device, peak
        self.parameters = list(model.parameters())
        self.switches = Switches(*(torch.zeros((), dtype=torch.bool, device=device) for _ in range(2)))
        self.scale = torch.ones((), device=device)
        decayed = [p for n, p in model.named_parameters() if p.dim() > 1 and ".indexer." not in n]
        others = [p for n, p in model.named_parameters() if p.dim() <= 1 or ".indexer." in n]
        cuda = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}],
            lr=torch.tensor(peak, device=device), betas=(0.9, 0.99), fused=cuda, capturable=cuda,
        )  # fmt: skip
        self._replay: dict[int, Callable[[Tensor, Tensor], Tensor]] = {}

    def step(self, ids: Tensor, weights: Tensor, scale: float, dense: bool, coarse: bool) -> Tensor:
        """One update at `scale` times the peak rate; returns `objective`'s report (on the device)."""
        self.switches.dense.fill_(dense)
        self.switches.coarse.fill_(coarse)
        self.scale.fill_(scale)
        for group in self.optimizer.param_groups:
            group["lr"].fill_(scale * self.peak)
        if self.device.type != "cuda":
            return self._update(ids, weights)
        length = ids.shape[1]
        if length not in self._replay:
            self._replay[length] = self._capture(ids.to(self.device), weights.to(self.device))
        return self._replay[length](ids, weights)

    def _update(self, ids: Tensor, weights: Tensor) -> Tensor:
        signals = Signals()
        loss, report = objective(self.network, ids, weights, self.switches, signals)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            for bias, load in signals.load:
                bias += BIAS_RATE * self.scale * torch.sign(1 / len(load) - load)
        return report

    def _capture(self, ids: Tensor, weights: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """Record an update on these shapes; the two warm-up updates before it are real ones."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._update(ids, weights)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            report = self._update(ids, weights)

        def replay(new_ids: Tensor, new_weights: Tensor) -> Tensor:
            ids.copy_(new_ids, non_blocking=True)
            weights.copy_(new_weights, non_blocking=True)
            graph.replay()
            return report.clone()

        return replay


def save(model: DeepseekV4ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """A complete checkpoint; tensors are named as transformers' modules are."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config
    config.architectures = ["DeepseekV4ForCausalLM"]
    config.save_pretrained(folder)
    ends = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps({**ends, "do_sample": False}, indent=2) + "\n")
    vocabulary.save(tokenizer, folder, config.max_position_embeddings)


def train(options: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    torch.set_flush_denormal(True)
    torch.set_num_threads(options.threads)
    if options.init:
        tokenizer = Tokenizer.from_file(str(options.init / "tokenizer.json"))
    else:
        tokenizer = vocabulary.build(texts(options.seed, 3000), VOCABULARY)
        if split := [word for word in ADJECTIVES + NOUNS if len(tokenizer.encode(f" {word}").ids) > 1]:
            raise SystemExit(f"the vocabulary is too small: {split} are not single tokens")
    model = initialise(configuration(tokenizer.get_vocab_size()), options.seed)
    if options.init:
        model.load_state_dict(load_file(options.init / "model.safetensors"))
    trainer = Trainer(model.to(device), device, options.rate)
    recipe = Recipe(tokenizer.to_str(), options.seed, options.steps, options.tokens, options.start)
    begun, reports = time.monotonic(), []
    for step, (ids, weights) in enumerate(stream(recipe, options.workers)):
        progress, scale = recipe.progress(step), curriculum.rate(step, options.steps)
        dense, coarse = curriculum.dense(progress), curriculum.coarse(progress, step)
        reports.append(trainer.step(ids, weights, scale, dense, coarse))
        if (step + 1) % options.every == 0 or step + 1 == options.steps:
            ce, kl, tokens, rows = torch.stack(reports).mean(0).tolist()
            took, mode = time.monotonic() - begun, f"{'dense' if dense else 'sparse'}{' fp4' if coarse else ''}"
            print(f"{step + 1:6d} {took:6.0f}s loss {ce:.4f} kl {kl:.4f} tokens {tokens:.4f} rows {rows:.4f} {mode}")
            sys.stdout.flush()
            reports.clear()
        if (step + 1) % options.keep == 0:
            save(model, tokenizer, options.out)
    save(model, tokenizer, options.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--init", type=Path, help="checkpoint to continue from (its tokenizer is kept)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--start", type=float, default=0.0, help="progress of the curriculum at the first step")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens in a batch")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--workers", type=int, default=0, help="processes that make batches")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the forward pass")
    parser.add_argument("--every", type=int, default=100, help="steps between two lines of the log")
    parser.add_argument("--keep", type=int, default=1000, help="steps between two saved checkpoints")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
