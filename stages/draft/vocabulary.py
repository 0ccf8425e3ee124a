"""The draft vocabulary: the target tokens that the training answers use most, as maps both ways.

Letters: V target vocabulary, D draft vocabulary.
"""

import torch
from torch import Tensor


def choose_vocabulary(counts: Tensor, size: int, always: list[int]) -> Tensor:
    """The `size` most frequent tokens of counts [V] int64, ascending [D]; `always` (end tokens) are in it whatever their count.

    Ties go to the lower id, so the same counts give the same vocabulary on every machine.
    """
    rank = counts.clone()
    rank[always] = counts.max() + 1
    order = torch.sort(rank, descending=True, stable=True).indices  # stable: the lower id first
    return order[:size].sort().values


def build_vocabulary_maps(chosen: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """chosen [D] ascending target ids -> d2t [D] int64 offsets (target id - draft id), t2d [V] bool (SGLang, vLLM, EAGLE)."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[chosen] = True
    return chosen - torch.arange(len(chosen)), t2d


def compute_coverage(counts: Tensor, t2d: Tensor) -> float:
    """The share of tokens counted in counts [V] that the draft can say."""
    total = int(counts.sum())
    return int(counts[t2d].sum()) / total if total else 1.0
