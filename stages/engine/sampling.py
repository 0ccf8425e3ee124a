"""Sampling of the target's next token: greedy, or drawn at a temperature after top-k and top-p.

A draw is by inversion: tokens lie on a line in the order of their ids, each as long as its probability, and a uniform number
of [0, 1) points at one. Token n of an answer is drawn by the answer's n-th number, at whichever node of a tree it is
drawn. So one seed gives one answer: plain and speculative decoding agree, and no tree, draft or length limit changes a token.

Verifying a tree is therefore lossless in distribution: at each node the target draws from its own distribution, and the
path continues while the draw is among the node's children. A child x is accepted with probability p(x), and a token that no
child proposes is drawn from the remaining distribution. This is SGLang 0.5.17's target-only verification
(`tree_speculative_sampling_target_only` with both thresholds at 1), with one draw a node instead of one a child.

Letters: M nodes, V vocabulary.
"""

import hashlib
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor


class SamplingParams(NamedTuple):
    """Sampling of one answer."""

    temperature: float  # above 0
    top_p: float  # 1: all
    top_k: int | None  # None: all
    seed: int  # this answer's own


def make_sampling_params(temperature: float, top_p: float, top_k: int | None, about: str) -> SamplingParams | None:
    """Return parameters with a seed hashed from `about`, independent of the order of answers; None (greedy) at temperature 0."""
    if temperature == 0:
        return None
    digest = hashlib.sha256(about.encode()).digest()
    return SamplingParams(temperature, top_p, top_k, int.from_bytes(digest[:8], "big") >> 1)


class TokenSampler:
    """Samples the tokens of one answer; greedy without parameters."""

    def __init__(self, sampling: SamplingParams | None, uniforms: Tensor):
        """uniforms [*] float64: the answer's own numbers, one for each of its tokens."""
        self._sampling, self._uniforms = sampling, uniforms
        # Answers that share this differ in their numbers alone, so that one CUDA graph serves them all.
        self.graph_key: Hashable = None if sampling is None else sampling[:3]

    def sample(self, logits: Tensor, indices: Tensor) -> Tensor:
        """logits [M, V] after each of M nodes, indices [M] of their tokens in the answer, from 0 -> tokens [M]."""
        if self._sampling is None:
            return logits.argmax(-1)
        temperature, top_p, top_k, _ = self._sampling
        return draw_tokens(compute_probabilities(logits, temperature, top_p, top_k), self._uniforms[indices])


def draw_uniforms(seed: int, count: int) -> Tensor:
    """Return [count] float64 in [0, 1), drawn on the CPU, equal on every device; a longer draw starts with a shorter one."""
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def compute_probabilities(logits: Tensor, temperature: float, top_p: float = 1.0, top_k: int | None = None) -> Tensor:
    """logits [..., V] -> probabilities [..., V] float32 after temperature, then top-k, then top-p, as in transformers,
    SGLang and vLLM.

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


def draw_tokens(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """probabilities [M, V], uniforms [M] float64 in [0, 1) -> tokens [M], none of probability 0."""
    # In float32 the sum over a vocabulary would be off by more than the probability of a rare token.
    ends = probabilities.double().cumsum(-1)
    return torch.searchsorted(ends, uniforms[:, None] * ends[:, -1:], right=True)[:, 0]
