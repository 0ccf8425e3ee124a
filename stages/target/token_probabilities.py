"""The distribution that a token is drawn from: decoding draws from it, replay computes with it.

Letters: V vocabulary.
"""

import torch
from torch import Tensor


def compute_probabilities(
    logits: Tensor, temperature: float | Tensor, top_p: float = 1.0, top_k: int | None = None
) -> Tensor:
    """logits [..., V] -> probabilities [..., V] float32 after temperature (one, or [..., 1]), then top-k, then top-p, as in
    transformers, SGLang and vLLM.

    top-k keeps the k greatest logits and all equal to the last of them. top-p keeps the likeliest tokens until they sum to
    top_p, at least one; among equal tokens the smaller id comes first.
    """
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        last = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < last, -torch.inf)
    probabilities = logits.softmax(-1)
    if top_p < 1:
        ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p  # likelier tokens already sum to top_p
        probabilities = torch.zeros_like(probabilities).scatter(-1, ids, ordered.masked_fill(beyond, 0))
        probabilities /= probabilities.sum(-1, keepdim=True)
    return probabilities
