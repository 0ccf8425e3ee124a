"""Exact replay of sampled drafts on sampled answers: the chains of a block draft, by the expectation over what is drawn.

A draft is drawn from q, the draft's distribution at the answers' temperature, and accepted with probability min(1, p / q); p is
the target's distribution after temperature and top-p (engine/sampling.py). So token v is committed as an accepted draft with
probability min(p(v), q(v)), and with p(v) in all. Given that the answer has v, its draft was accepted with probability

    beta = min(1, q(v) / p(v))

while those before it in the block were, and q is then that of the answer's own tokens (teacher forcing). What was accepted says
nothing of the tokens to come, so the cycles of an answer are a Markov chain over its positions: a cycle at position a that
accepts j drafts, with probability beta_1 ... beta_j (1 - beta_(j+1)), is followed by one at a + j + 1. One pass over the
positions gives the probability that a cycle starts at each, and so the expected cycles and accepted drafts, without a draw.

Positions, and the cut at an answer's end, are those of exact_replay.py.

Letters: B answers, T tokens of a row, L positions of all answers, P of the longest, D drafts of a block, G widths, H hidden,
V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from stages.engine.sampling import compute_probabilities
from stages.families.block.exact_replay import AnswerPositions
from stages.families.block.model import BlockDraft
from stages.families.draft_replay import ExpectedCounts
from stages.trees.expansion import count_logit_rows


@torch.inference_mode()
def replay_sampled_drafts(
    draft: BlockDraft,
    head: Tensor,  # [V, H] the target's
    states: Tensor,  # [L, D, H] of `compute_anchor_states`
    last: Tensor,  # [L, H] the target's hidden state at each anchor, after the final norm
    positions: AnswerPositions,
    temperature: float,  # above 0
    top_p: float,
    logits_scale: float = 1.0,  # of the target's manifest
) -> ExpectedCounts:
    """Return the expected counts of sampled drafts on answers that were sampled at a temperature with a top-p."""
    # The draft's logits are those of its states times the head's table, as in engines.
    target = compute_target_probabilities(last, head, positions.following[:, 0], temperature / logits_scale, top_p)
    proposal = compute_draft_probabilities(draft, head, states, positions, temperature)
    return walk_expected_cycles(compute_acceptance(proposal, target, positions.following), positions.counts)


def compute_target_probabilities(
    last: Tensor, head: Tensor, tokens: Tensor, temperature: float, top_p: float
) -> Tensor:
    """Return [L] float64, the target's probability of tokens [L] after hidden states [L, H].

    A token that top-p leaves out, as the last ones kept may be where hidden states were stored in few bits, has its probability
    before top-p.
    """
    found = [last.new_zeros(0, dtype=torch.float64)]
    for chunk, chunk_tokens in zip(
        *(x.split(count_logit_rows(4 * len(head), head.device)) for x in (last, tokens)), strict=True
    ):
        logits, token_column = chunk @ head.T, chunk_tokens[:, None]
        probabilities = compute_probabilities(logits, temperature, top_p).gather(1, token_column)[:, 0]
        uncut = compute_probabilities(logits, temperature).gather(1, token_column)[:, 0]
        found.append(torch.where(probabilities > 0, probabilities, uncut).double())
    return torch.cat(found)


def compute_draft_probabilities(
    draft: BlockDraft,
    head: Tensor,  # [V, H]
    states: Tensor,  # [L, D, H]
    positions: AnswerPositions,
    temperature: float,
) -> Tensor:
    """Return [L, D] float64, the draft's probability of each following token after those before it; past the end arbitrary."""
    labels = positions.following.clamp(min=0)
    previous = torch.cat([positions.anchor_tokens[:, None], labels[:, :-1]], 1)
    found = [states.new_zeros(0, states.shape[1], dtype=torch.float64)]
    size = max(1, count_logit_rows(4 * len(head), head.device) // states.shape[1])
    for chunk, tokens_before, next_tokens in zip(*(x.split(size) for x in (states, previous, labels)), strict=True):
        probabilities = compute_probabilities(draft.compute_logits(chunk, tokens_before, head), temperature)
        found.append(probabilities.gather(2, next_tokens[..., None])[..., 0].double())
    return torch.cat(found)


def compute_acceptance(draft_probabilities: Tensor, target_probabilities: Tensor, following: Tensor) -> Tensor:
    """Return beta [L, D] of drafts [L, D]: draft d of position a is the token after position a + d; 0 past the answer's end."""
    num_positions, num_drafts = following.shape
    positions = torch.arange(num_positions, device=following.device)[:, None] + torch.arange(
        num_drafts, device=following.device
    )
    # [L, D]; past the end of an answer of another
    target = target_probabilities[positions.clamp(max=max(0, num_positions - 1))]
    return torch.where(following >= 0, (draft_probabilities / target).clamp(max=1), 0.0)


def walk_expected_cycles(acceptance: Tensor, counts: Tensor) -> ExpectedCounts:
    """acceptance [L, D] float64 of `compute_acceptance`, counts [B] positions of each answer -> expected counts."""
    num_answers, num_drafts = len(counts), acceptance.shape[1]
    # Probability that a cycle there accepts at least d + 1 drafts.
    by_answer = acceptance.cumprod(1).split(counts.tolist())
    at_least = pad_sequence(list(by_answer), batch_first=True)  # [B, P, D]
    widths = torch.arange(1, num_drafts + 1, device=acceptance.device)[:, None]
    depths = torch.arange(num_drafts + 2, device=acceptance.device)
    reachable = (depths <= widths).double()  # [G, D + 2] of accepting at least 0, 1, ... D + 1 drafts
    visits = at_least.new_zeros(num_answers, num_drafts, at_least.shape[1] + num_drafts + 1)  # [B, G, P + D + 1]
    visits[..., 0] = 1  # a cycle starts at the first position
    cycles, reaching = visits.new_zeros(num_answers, num_drafts), visits.new_zeros(num_answers, num_drafts, num_drafts)
    for position in range(at_least.shape[1]):
        position_visits = visits[..., position] * (counts > position)[:, None]  # [B, G]
        padded = torch.nn.functional.pad(at_least[:, None, position], (1, 0), value=1.0)
        tail_probabilities = torch.nn.functional.pad(padded, (0, 1)) * reachable  # [B, G, D + 2]
        visits[..., position + 1 : position + num_drafts + 2] += position_visits[..., None] * (
            tail_probabilities[..., :-1] - tail_probabilities[..., 1:]
        )
        cycles += position_visits
        reaching += position_visits[..., None] * tail_probabilities[..., 1:-1]
    return ExpectedCounts(reaching.sum(-1), cycles, reaching)
