"""What a training step sees, as a function of progress (0..1): lengths, corpus shape, sparsity, rounding, rate."""

import math
import random
from dataclasses import dataclass

from corpus import Shape

LENGTHS = (160, 320, 512, 704, 960)
TOKENS_PER_SENTENCE = 11  # of a fact; filler is about as long


@dataclass(frozen=True)
class Plan:
    """One step: rows of `length` tokens whose conversations come from `shape`."""

    length: int
    shape: Shape


def plan(progress: float, rng: random.Random) -> Plan:
    """Short single lookups first, then lists, unknown names and shared words, then every length up to the longest."""
    ready = min(1.0, progress / 0.2)  # 1 once the full task is on
    count = 1 + int(ready * (len(LENGTHS) - 1) + 1e-9)
    [length] = rng.choices(LENGTHS[:count], (1, 2, 3, 3, 2)[:count])
    most = max(4, (length - 70) // TOKENS_PER_SENTENCE)
    if progress < 0.03:
        easy = Shape((2, 5), (1, 4), (2, 3), filler=0.1, small_talk=0.02, unknown=0.0, many=0.2, crossed=0.0)
        return Plan(length, easy)
    fewest = max(1, (most - 14) if length > LENGTHS[0] else 1)
    return Plan(
        length,
        Shape((fewest, most), (1, 5), (2, 3 + round(4 * ready)), unknown=0.12 * ready, crossed=0.3 * ready, many=0.6),
    )


def dense(progress: float) -> bool:
    """Attend to every entry while the indexer learns to imitate the attention."""
    return progress < 0.35


def coarse(progress: float, step: int) -> bool:
    """Every other late step rounds the index keys to fp4, so that both precisions are trained."""
    return progress >= 0.75 and step % 2 == 0


def rate(step: int, steps: int) -> float:
    """Learning rate over its peak: linear warm-up, constant, cosine to 1 % over the last half."""
    warm = min(1.0, (step + 1) / min(200, max(1, steps // 10)))
    tail = max(0.0, (step / steps - 0.5) / 0.5)
    return warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * tail)))
