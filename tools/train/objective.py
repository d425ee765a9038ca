"""The training loss: next-token cross entropy on the assistant's tokens, plus the indexer's imitation of attention."""

import torch
import torch.nn.functional as F
from network import Network, Signals, Switches
from torch import Tensor


def imitation(signals: Signals, asked: Tensor) -> Tensor:
    """Mean KL(attention over entries || softmax of indexer scores), after DeepSeek-V3.2's dense warm-up.

    asked [B, S]: 1 where the next token is the assistant's. A position counts by the attention mass it puts on
    entries, and ten times less when nothing is asked there. Only the indexer gets a gradient from this.
    """
    total = asked.new_zeros(())
    for scores, attention in zip(signals.scores, signals.attention):
        mass = attention.sum(-1)
        target = attention / (mass.unsqueeze(-1) + 1e-9)
        guess = scores.masked_fill(scores.isinf(), -1e30).log_softmax(-1)
        divergence = (target * ((target + 1e-9).log() - guess)).sum(-1)
        weight = mass * (asked + 0.1)
        total = total + (divergence * weight).sum() / weight.sum()
    return total / len(signals.scores)


def objective(
    network: Network, ids: Tensor, weights: Tensor, switches: Switches, signals: Signals
) -> tuple[Tensor, Tensor]:
    """(loss, [cross entropy, imitation, share of written tokens right, share of rows right in full]).

    A row that is right in full is one whose every answer greedy decoding would reproduce exactly.
    """
    logits, target, weight = network.forward(ids, switches, signals)[:, :-1], ids[:, 1:], weights[:, 1:]
    entropy = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(weight)
    entropy = (entropy * weight).sum() / weight.sum()
    written = weight > 0
    likeness = imitation(signals, F.pad(written.float(), (0, 1)))
    right = (logits.argmax(-1) == target) | ~written
    accuracy = (right & written).sum() / written.sum()
    report = torch.stack([entropy.detach(), likeness.detach(), accuracy, right.all(-1).float().mean()])
    return entropy + likeness, report
