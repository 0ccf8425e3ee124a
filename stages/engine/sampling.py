"""How the target's next token is chosen: the likeliest, or drawn at a temperature, by top-k and top-p from the likeliest alone.

A draw is by inversion: tokens lie on a line in the order of their ids, each as long as it is likely, and a number of
[0, 1) points at one. The n-th token of an answer is drawn by that answer's n-th number, whoever asks for it and at
whichever node of a tree. So one seed is one answer: plain and speculative decoding say the same, and no tree, draft or
length limit moves a token.

Verifying a tree is then lossless in distribution by itself: at each node the target draws from its own distribution, and
decoding goes down while the draw is among the node's children. So a child x is accepted with chance p(x), and what none of
them takes is drawn from the rest: SGLang's target-only verification (`tree_speculative_sampling_target_only` with both
thresholds at 1, research/sglang.md section 2), in one draw a node instead of a coin a child.

Letters: M nodes, V vocabulary.
"""

import hashlib
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor


class SamplingParams(NamedTuple):
    """How one answer is drawn."""

    temperature: float  # above 0
    top_p: float  # 1: all
    top_k: int | None  # None: all
    seed: int  # this answer's own


def make_sampling_params(temperature: float, top_p: float, top_k: int | None, about: str) -> SamplingParams | None:
    """How an answer is drawn: by a seed from what it is `about`, so that order has no part in it; None: greedily."""
    if temperature == 0:
        return None
    drawn = hashlib.sha256(about.encode()).digest()
    return SamplingParams(temperature, top_p, top_k, int.from_bytes(drawn[:8], "big") >> 1)


class TokenSampler:
    """Chooses the tokens of one answer; without `make_sampling_params`, greedily."""

    def __init__(self, how: SamplingParams | None, numbers: Tensor):
        """numbers [*] float64: the answer's own, as many as are asked for."""
        self._how, self._numbers = how, numbers
        # Answers alike in this differ in their numbers alone, so that one recorded pass serves them all.
        self.kind: Hashable = None if how is None else how[:3]

    def choose(self, logits: Tensor, places: Tensor) -> Tensor:
        """logits [M, V] after each of M nodes, places [M]: which token of the answer comes there, from 0 -> tokens [M]."""
        if self._how is None:
            return logits.argmax(-1)
        temperature, top_p, top_k, _ = self._how
        return draw_tokens(compute_probabilities(logits, temperature, top_p, top_k), self._numbers[places])


def draw_uniforms(seed: int, count: int) -> Tensor:
    """[count] float64 of [0, 1). More of them begin with fewer; drawn on the CPU, so that every device has the same."""
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def compute_probabilities(logits: Tensor, temperature: float, top_p: float = 1.0, top_k: int | None = None) -> Tensor:
    """logits [..., V] -> what tokens are drawn from [..., V] float32: temperature, then top-k, then top-p, as transformers,
    SGLang and vLLM do it.

    top-k keeps the k greatest logits and whatever equals the last of them; top-p the likeliest tokens until they come to
    top_p, so always one, of equals that of the smaller id.
    """
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        last = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < last, -torch.inf)
    chances = logits.softmax(-1)
    if top_p < 1:
        ordered, ids = chances.sort(dim=-1, descending=True, stable=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p  # what is likelier comes to top_p already
        chances = torch.zeros_like(chances).scatter(-1, ids, ordered.masked_fill(beyond, 0))
        chances /= chances.sum(-1, keepdim=True)
    return chances


def draw_tokens(chances: Tensor, number: Tensor) -> Tensor:
    """chances [M, V], a number of [0, 1) for each [M] float64 -> tokens [M]; never one whose chance is 0."""
    ends = chances.double().cumsum(-1)  # in float32 a vocabulary's sum would be off by more than a rare token's chance
    return torch.searchsorted(ends, number[:, None] * ends[:, -1:], right=True)[:, 0]
