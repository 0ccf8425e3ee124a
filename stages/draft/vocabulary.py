"""The draft vocabulary: the most frequent target tokens of the training answers, and maps in both directions.

Dimensions: V target vocabulary, D draft vocabulary.
"""

import torch
from torch import Tensor


def choose_vocabulary(counts: Tensor, size: int, always: list[int]) -> Tensor:
    """Return the ids [D] of the `size` most frequent tokens by counts [V] int64, ascending; `always` (end tokens) are included.

    Ties go to the lower id, so equal counts give the same vocabulary on every machine.
    """
    priority = counts.clone()
    priority[always] = counts.max() + 1
    order = torch.sort(priority, descending=True, stable=True).indices
    return order[:size].sort().values


def build_vocabulary_maps(chosen: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return d2t [D] int64, offsets (target id - draft id), and t2d [V] bool of ascending ids `chosen` [D]."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[chosen] = True
    return chosen - torch.arange(len(chosen)), t2d


def compute_coverage(counts: Tensor, t2d: Tensor) -> float:
    """Return the fraction of the tokens counted in counts [V] that are in the draft vocabulary; 1.0 without tokens."""
    total = int(counts.sum())
    return int(counts[t2d].sum()) / total if total else 1.0
