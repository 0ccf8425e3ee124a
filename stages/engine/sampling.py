"""Sampling of the target's next token: greedy, or drawn at a temperature after top-k and top-p.

A draw is by inversion: tokens lie on a line in the order of their ids, each as long as its probability, and a uniform number
of [0, 1) points at one. Token n of an answer is drawn by the answer's n-th number, at whichever node of a tree it is
drawn. So one seed gives one answer: plain and speculative decoding agree, and no tree, draft or length limit changes a token.

Verifying a tree is therefore lossless in distribution: at each node the target draws from its own distribution, and the
path continues while the draw is among the node's children. A child x is accepted with probability p(x), and a token that no
child proposes is drawn from the remaining distribution. This is SGLang 0.5.17's target-only verification
(`tree_speculative_sampling_target_only` with both thresholds at 1), with one draw a node instead of one a child.

Sampled drafts (SGLang with DSpark or DFlash2, vLLM's `draft_sample_method: probabilistic`) are drawn too, from q, the draft's
distribution at the same temperature, without top-k and top-p. Draft x is accepted with probability min(1, p(x) / q(x)), p being
the target's distribution as above; else the token is drawn from the residual (p - q)+, normalised; after a whole accepted chain
from p. So the committed tokens have the target's distribution (Leviathan et al. 2023, appendix A.1). An answer has three
numbers for each token: one draws the draft, one decides, one draws the target's token. Whether a draft is accepted depends on
numbers up to its own position only, so the numbers of rejected draft tokens can be used again in the next cycle without bias.

Letters: B prompts decoded together, M nodes, N nodes of all prompts, V vocabulary.
"""

import hashlib
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

DRAWN_CHUNK = 128  # tokens; the vocabularies of Llama 3, Qwen and Gemma are multiples of it


def compute_probabilities(
    logits: Tensor, temperature: float | Tensor, top_p: float = 1.0, top_k: int | None = None
) -> Tensor:
    """Return the distribution that a token is drawn from, [..., V] float32, of logits [..., V].

    That is after temperature (one, or [..., 1]), then top-k, then top-p, as in transformers, SGLang and vLLM.
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


class SamplingParams(NamedTuple):
    """Sampling of one answer."""

    temperature: float  # above 0
    top_p: float  # 1: all
    top_k: int | None  # None: all
    seed: int  # this answer's own
    samples_drafts: bool = False  # drafts are drawn too, and verified by the ratio of both probabilities

    @property
    def shared(self) -> tuple[float, float, int | None, bool]:
        """Return what answers that are decoded together have in common."""
        return self.temperature, self.top_p, self.top_k, self.samples_drafts

    @property
    def draft_temperature(self) -> float | None:
        """Return the temperature that drafts are drawn at; None where they are greedy."""
        return self.temperature if self.samples_drafts else None


def make_sampling_params(
    temperature: float, top_p: float, top_k: int | None, about: str, samples_drafts: bool = False
) -> SamplingParams | None:
    """Return parameters with a seed hashed from `about`, independent of the order of answers; None (greedy) at temperature 0."""
    if temperature == 0:
        return None
    return SamplingParams(temperature, top_p, top_k, _hash_seed(about), samples_drafts)


def _hash_seed(about: str) -> int:
    return int.from_bytes(hashlib.sha256(about.encode()).digest()[:8], "big") >> 1


class TokenSampler:
    """Samples the tokens of one answer; greedy without parameters."""

    def __init__(self, sampling: SamplingParams | None, uniforms: Tensor, logits_scale: float = 1.0):
        """uniforms [*] float64: the answer's own numbers, one for each of its tokens. The target's logits are `logits_scale`
        times those that are given.
        """
        self._sampling, self._uniforms, self._logits_scale = sampling, uniforms, logits_scale
        # Answers that share this differ in their numbers alone, so that one CUDA graph serves them all.
        self.graph_key: Hashable = None if sampling is None else sampling[:3]

    def sample(self, logits: Tensor, indices: Tensor) -> Tensor:
        """logits [M, V] after each of M nodes, indices [M] of their tokens in the answer, from 0 -> tokens [M]."""
        if self._sampling is None:
            return logits.argmax(-1)
        return draw_tokens(self._compute_probabilities(logits), self._uniforms[indices])

    def sample_after_drafts(
        self,
        logits: Tensor,  # [B, M, V] after each node of chains, the roots first
        indices: Tensor,  # [B, M] as for `sample`
        drafts: Tensor,  # [B, M-1]
        draft_probabilities: Tensor,  # [B, M-1, V] that they were drawn from
        coins: Tensor,  # [B, M-1] float64 in [0, 1)
    ) -> Tensor:
        """Return the target's tokens [B, M]: after a node whose draft is accepted the draft itself, else one of the residual."""
        probabilities = self._compute_probabilities(logits)
        accepted = accept_drafts(probabilities[:, :-1], draft_probabilities, drafts, coins)
        residual = compute_residual(probabilities[:, :-1], draft_probabilities)
        remaining = torch.cat([residual, probabilities[:, -1:]], dim=1)
        tokens = draw_tokens(remaining.flatten(0, 1), self._uniforms[indices].flatten()).view_as(indices)
        return torch.cat([torch.where(accepted, drafts, tokens[:, :-1]), tokens[:, -1:]], dim=1)

    def _compute_probabilities(self, logits: Tensor) -> Tensor:
        assert self._sampling is not None, "greedy decoding has no probabilities"
        temperature, top_p, top_k = self._sampling[:3]
        return compute_probabilities(logits, temperature / self._logits_scale, top_p, top_k)


class SlotSampler(TokenSampler):
    """Samples the tokens of slots whose answers have temperatures of their own; 0 is greedy."""

    def __init__(self, temperatures: Tensor, uniforms: Tensor, top_p: float, logits_scale: float):
        """temperatures [B] float32, uniforms [B, C] float64: token i of a slot's answer is drawn by its number i."""
        super().__init__(None, uniforms.flatten(), logits_scale)
        self._temperatures, self._capacity, self._top_p = temperatures, uniforms.shape[1], top_p
        self.graph_key = "temperatures", top_p

    def sample(self, logits: Tensor, indices: Tensor) -> Tensor:
        """logits [M, V], indices [M] of their numbers in the flattened uniforms -> tokens [M]."""
        temperatures = self._temperatures[indices // self._capacity]
        divisors = torch.where(temperatures > 0, temperatures, 1.0)[:, None] / self._logits_scale
        probabilities = compute_probabilities(logits, divisors, self._top_p)
        return torch.where(temperatures > 0, draw_tokens(probabilities, self._uniforms[indices]), logits.argmax(-1))


def draw_uniforms(seed: int, count: int) -> Tensor:
    """Return [count] float64 in [0, 1), drawn on the CPU, equal on every device; a longer draw starts with a shorter one."""
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def draw_draft_uniforms(seed: int, count: int) -> Tensor:
    """Return [count, 2] as `draw_uniforms`, independent of it: the first of each draws a draft, the second is its coin."""
    return draw_uniforms(_hash_seed(f"drafts:{seed}"), 2 * count).view(count, 2)


def accept_drafts(target: Tensor, draft: Tensor, drafts: Tensor, coins: Tensor) -> Tensor:
    """target, draft [..., V] probabilities, drafts [...], coins [...] in [0, 1) -> [...] bool: coin < p / q.

    In float64, so that no coin is rounded up to 1; a token of q <= p is always accepted, one of p = 0 never.
    """
    p, q = (probabilities.gather(-1, drafts[..., None])[..., 0].double() for probabilities in (target, draft))
    return coins * q < p


def compute_residual(target: Tensor, draft: Tensor) -> Tensor:
    """Return (p - q)+ [..., V], not normalised; p where the two are equal but for rounding, and nothing would remain."""
    residual = (target - draft).clamp(min=0)
    return torch.where(residual.sum(-1, keepdim=True) > 0, residual, target)


def draw_tokens(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """probabilities [M, V], uniforms [M] float64 in [0, 1) -> tokens [M], none of probability 0."""
    # In float32 the sum over a vocabulary would be off by more than the probability of a rare token. First a chunk of the line is
    # drawn, then a token of it: a cumulative sum over the whole vocabulary takes a GPU longer than the target's layers.
    chunks = F.pad(probabilities, (0, -probabilities.shape[-1] % DRAWN_CHUNK)).unflatten(-1, (-1, DRAWN_CHUNK))
    sums = chunks.sum(-1, dtype=torch.float64)  # [M, chunks]
    ends = sums.cumsum(-1)
    below = uniforms.new_zeros(1)
    # A product may round up to the end.
    points = (uniforms[:, None] * ends[:, -1:]).minimum(ends[:, -1:].nextafter(below))
    chunk = torch.searchsorted(ends, points, right=True)  # [M, 1]
    within = chunks.gather(1, chunk[..., None].expand(-1, -1, DRAWN_CHUNK))[:, 0].double().cumsum(-1)
    # Rounded differently than `ends`, it may end before the point.
    points = (points - (ends - sums).gather(1, chunk)).clamp(min=0).minimum(within[:, -1:].nextafter(below))
    return (chunk * DRAWN_CHUNK + torch.searchsorted(within, points, right=True))[:, 0]
