"""Exact replay: what every tree would accept, from cached hidden states alone (research/replay.md).

At temperature 0 the target's answer does not depend on the draft, and what the draft proposes after token t depends on
the tokens and features up to t only. So expand once at *every* place of the answer, find how deep the answer stays
inside the candidates, and walk: accept, step over the bonus token, repeat. One expansion holds every topk, and of each
every smaller num_steps and every num_draft_tokens: a node is in the tree of (steps, topk, tokens) iff fewer than
tokens - 1 candidates of topk's first `steps` steps come before it. What it costs follows from places and topks; a tree
more costs two bytes a place, and its walk.

Places are not padded: those of all answers stand one behind the other, and are expanded in parts that fit into memory.

Letters: B rows, T tokens, L places of all answers, N places of a part, S steps, C candidates, D nodes that are ranked,
G trees of the grid, K topks, Q thresholds.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from stages.draft.eagle3 import (
    Eagle3Draft,
    MultimodalFeatures,
    attend_prefix_and_ancestors,
    build_prefix_mask,
    compute_first_state,
    encode_prefix,
)
from stages.replay.oracle_bounds import (
    PATH_PROBABILITY_THRESHOLDS,
    evaluate_threshold_trees,
    find_fewest_cycles,
    narrowest,
)
from stages.trees.draft_tree import TREE_SCORINGS, Candidates, check_tree, count_candidates, get_step_range
from stages.trees.expansion import MAX_INTERMEDIATE_ELEMENTS, expand_beams

MISSING_RANK = torch.iinfo(torch.int32).max  # the rank of a node that does not exist
TreeTuple = tuple[int, int, int]  # num_steps, topk, num_draft_tokens


class WalkCounts(NamedTuple):
    """Of every answer and tree, as integers."""

    accepted: Tensor  # [B, G] drafts
    cycles: Tensor  # [B, G] verify cycles
    reached: Tensor  # [B, G, S] cycles that accepted at least s + 1 drafts
    depth: Tensor  # [B, G] depths of the trees of those cycles, summed


class ReplayOutput(NamedTuple):
    """`WalkCounts` of the grid's trees, and beside them what other trees from the same candidates would do: `bounds`."""

    accepted: Tensor  # [B, G]
    cycles: Tensor  # [B, G]
    reached: Tensor  # [B, G, S]
    depth: Tensor  # [B, G]
    oracle_accepted: Tensor  # [B, G]
    oracle_cycles: Tensor  # [B, G]
    # Of each topk, ascending, each threshold, and of it the first 1, 2, ... steps: [B, K * Q * S, ...]. For depth it has the
    # drafted nodes of the cycles' trees, summed.
    adaptive: WalkCounts
    stood: Tensor | None = None  # [W, B, P] bool: does the walk of each watched tree stand there?


class ReplayCapacity(NamedTuple):
    """How much is dealt with at once."""

    tokens: int  # of rows, padded
    places: int


class PlaceRange(NamedTuple):
    """Places of one row, one behind the other: they share its keys."""

    row: int
    begin: int  # p of the first: the last verified token before the bonus
    end: int  # p after the last, and so many tokens the last one sees


class PlaceBatch(NamedTuple):
    """Blocks that are expanded together."""

    blocks: list[PlaceRange]
    row: Tensor  # [N] of each place
    where: Tensor  # [N] its p
    edges: Tensor  # which place each block begins with, and N

    @classmethod
    def of(cls, blocks: list[PlaceRange], device: torch.device) -> "PlaceBatch":
        row = torch.cat([torch.full((b.end - b.begin,), b.row) for b in blocks])
        where = torch.cat([torch.arange(b.begin, b.end) for b in blocks])
        edges = torch.tensor([0, *(b.end - b.begin for b in blocks)]).cumsum(0)
        return cls(blocks, row.to(device), where.to(device), edges.to(device))


class PlaceTables:
    """What is found at every place: those of all answers one behind the other, and one that is nobody's (L + 1)."""

    def __init__(self, trees: Sequence[TreeTuple], places: int, semantics: str, device: torch.device):
        self.trees, self.topks, self.steps = trees, sorted({k for _, k, _ in trees}), max(s for s, _, _ in trees)
        self.thresholds = TREE_SCORINGS[semantics].score(
            torch.tensor(PATH_PROBABILITY_THRESHOLDS, device=device)
        )  # [Q]
        cuts = len(self.topks), len(PATH_PROBABILITY_THRESHOLDS), self.steps, places + 1
        drafts, nodes = _dtypes(trees)
        self.accepted = torch.zeros(len(trees), places + 1, dtype=drafts, device=device)  # [G, L + 1] drafts
        self.deep = torch.zeros_like(self.accepted)  # [G, L + 1] the tree's depth
        self.reach = torch.zeros_like(self.accepted)  # [G, L + 1] drafts of the best tree of all
        self.cut_accepted = torch.zeros(cuts, dtype=drafts, device=device)  # [K, Q, S, L + 1]
        self.cut_nodes = torch.zeros(cuts, dtype=nodes, device=device)  # [K, Q, S, L + 1]

    def fill(self, here: slice, topk: int, candidates: Candidates, wanted: Tensor) -> None:
        """The places `here` of the trees of `topk`; wanted [N, S] the answer's next tokens."""
        scores, numbers, trees = candidates.scores, match_answer_path(candidates, wanted, topk), self.trees
        drafts = self.accepted.dtype
        matching = rank_candidates(scores, numbers, self.steps, topk)
        foremost = rank_candidates(scores, find_step_leaders(scores, self.steps, topk), self.steps, topk)
        for s in {s for s, k, _ in trees if k == topk}:
            chosen = [g for g, (steps, k, _) in enumerate(trees) if (steps, k) == (s, topk)]
            most = torch.tensor([trees[g][2] - 1 for g in chosen], device=scores.device)
            self.accepted[chosen, here] = (matching[:, :s, s - 1, None] < most).sum(1).T.to(drafts)
            self.deep[chosen, here] = (foremost[:, :s, s - 1, None] < most).sum(1).T.to(drafts)
            self.reach[chosen, here] = torch.minimum((numbers[:, :s] >= 0).sum(1), most[:, None]).to(drafts)
        place = self.topks.index(topk), ..., here
        self.cut_accepted[place], self.cut_nodes[place] = evaluate_threshold_trees(
            scores, numbers, topk, self.thresholds
        )

    def walked(self, counts: Tensor) -> ReplayOutput:
        adaptive = walk_cycles(self.cut_accepted.flatten(0, 2), self.cut_nodes.flatten(0, 2), counts, self.steps)
        static = walk_cycles(self.accepted, self.deep, counts, self.steps)
        return ReplayOutput(*static, *find_fewest_cycles(self.reach, counts, self.steps), adaptive)


@torch.inference_mode()
def replay_answers(
    draft: Eagle3Draft,
    embedding: Tensor,  # [V, H]
    ids: Tensor,  # [B, T] prompt and answer, right-padded
    features: Tensor,  # [B, T, 3H]
    starts: Tensor,  # [B] index of each answer's first token
    ends: Tensor,  # [B] index after its last
    trees: Sequence[TreeTuple],
    seen: MultimodalFeatures | None = None,  # of a target that sees
    semantics: str = "sglang",  # of tree.SEMANTICS
    at_once: int = 1024,  # places that are expanded together; see `compute_capacity`
    watched: Sequence[int] = (),  # W of the trees, whose places are told too
) -> ReplayOutput:
    """What every tree accepts of every answer, and how deep trees are where decoding stands. Raises ValueError for a tree that
    can't be built.
    """
    for steps, topk, tokens in trees:
        check_tree(steps, topk, tokens, draft.config.draft_vocab_size, draft.config.sliding_window)
    begins, last = (starts - 1).tolist(), (ends - 2).tolist()  # bonus token y_0 .. y_{n-2}
    spans = [PlaceRange(b, begin, max(begin, end)) for b, (begin, end) in enumerate(zip(begins, last, strict=True))]
    counts = torch.tensor([span.end - span.begin for span in spans], device=ids.device)
    tables, done = PlaceTables(trees, int(counts.sum()), semantics, ids.device), 0
    fused, keys, values = encode_prefix(draft, ids, features, embedding, seen)
    following = _gather_following_tokens(ids, ends, tables.steps)

    queries = draft.config.num_attention_heads * sum(tables.topks)  # of a place, at most
    width = max(1, MAX_INTERMEDIATE_ELEMENTS[ids.device.type] // (queries * ids.shape[1]))
    for blocks in _batch_place_ranges(spans, width, at_once):
        part = PlaceBatch.of(blocks, ids.device)
        positions = draft.get_rope_positions(part.where, None if seen is None else seen.positions[part.row, part.where])
        bonus, verified = embedding[ids[part.row, part.where + 1]], fused[part.row, part.where]
        hidden = _compute_first_states(draft, part, bonus, verified, positions, keys, values)
        look = partial(_attend_place_ranges, draft, part, keys, values)
        grown = expand_beams(draft, embedding, hidden, positions, look, tables.steps, tables.topks, semantics)
        here = slice(done, done := done + len(part.where))
        for topk, candidates in grown.items():
            tables.fill(here, topk, candidates, following[part.row, part.where])
    found = tables.walked(counts)
    return found._replace(stood=mark_cycle_places(tables.accepted[list(watched)], counts)) if watched else found


def _compute_first_states(
    draft: Eagle3Draft, part: PlaceBatch, embeds: Tensor, fused: Tensor, positions: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Step 0 at the places of a part: embeds of the bonus tokens and fused features [N, H], keys and values of all rows
    [B, T, G, E] -> state [N, H].
    """
    states = []
    for block, (i, j) in zip(part.blocks, pairwise(part.edges.tolist()), strict=True):
        sight = build_prefix_mask(part.where[None, i:j], block.end, draft.config.sliding_window)
        k, v = (x[block.row, None, : block.end] for x in (keys, values))
        states.append(
            compute_first_state(draft, embeds[None, i:j], fused[None, i:j], positions[None, i:j], k, v, sight)[0]
        )
    return torch.cat(states)


def _attend_place_ranges(
    draft: Eagle3Draft,
    part: PlaceBatch,
    keys: Tensor,
    values: Tensor,
    step: int,
    place: Tensor,
    query: Tensor,
    own_k: Tensor,
    own_v: Tensor,
) -> Tensor:
    """expand.Look over the rows' keys and values [B, T, G, E], block by block: each as far as its places see."""
    out, p = torch.empty_like(query), part.where[place]
    for block, (i, j) in zip(part.blocks, pairwise(torch.searchsorted(place, part.edges).tolist()), strict=True):
        sight = build_prefix_mask(p[None, i:j], block.end, draft.config.sliding_window, step)
        k, v = (x[block.row, None, : block.end] for x in (keys, values))
        out[i:j] = attend_prefix_and_ancestors(query[None, i:j], k, v, sight, own_k[None, i:j], own_v[None, i:j])[0]
    return out


def compute_capacity(draft: Eagle3Draft, trees: Sequence[TreeTuple], memory: int) -> ReplayCapacity:
    """What fits into `memory` bytes, half for each, reckoned as if no two topks had a node in common."""
    c, size = draft.config, draft.fc.weight.element_size()
    steps, topks = max(s for s, _, _ in trees), {k for _, k, _ in trees}
    cached = 2 * c.num_key_value_heads * c.head_dim
    drafts, nodes = (dtype.itemsize for dtype in _dtypes(trees))
    walked = 3 * drafts * len(trees) + (drafts + nodes) * len(topks) * len(PATH_PROBABILITY_THRESHOLDS) * steps
    token = (7 * c.hidden_size + 2 * cached) * size + walked + 8 * steps
    own = 2 * steps * cached  # old and new
    layer = 8 * c.hidden_size + 3 * c.intermediate_size + 6 * c.num_attention_heads * c.head_dim
    node = (own + layer) * size + 16 * max(topks)
    recorded = sum(k + (steps - 1) * k * k for k in topks) * 24 + steps * steps * 16
    return ReplayCapacity(max(1, memory // 2 // token), max(1, memory // 2 // (sum(topks) * node + recorded)))


def _dtypes(trees: Sequence[TreeTuple]) -> tuple[torch.dtype, torch.dtype]:
    """Return the types in which `PlaceTables` counts: the drafts of a path, and the candidates of an expansion."""
    steps, topk = max(s for s, _, _ in trees), max(k for _, k, _ in trees)
    return narrowest(steps), narrowest(count_candidates(steps, topk))


def _batch_place_ranges(spans: Sequence[PlaceRange], width: int, at_once: int) -> Iterator[list[PlaceRange]]:
    """Blocks of at most `width` places, gathered into parts of at most `at_once`."""
    part: list[PlaceRange] = []
    left = at_once
    for span in spans:
        begin = span.begin
        while begin < span.end:
            end = min(span.end, begin + min(width, left))
            part.append(PlaceRange(span.row, begin, end))
            left, begin = left - (end - begin), end
            if not left:
                yield part
                part, left = [], at_once
    if part:
        yield part


def match_answer_path(candidates: Candidates, wanted: Tensor, topk: int) -> Tensor:
    """wanted [N, S]: the answer's next tokens, -1 past its end -> candidate numbers [N, S] of the nodes that match them, -2
    from the first that none matches.
    """
    parent, numbers = torch.full_like(wanted[:, :1], -1), []
    for step in range(wanted.shape[1]):
        begin, end = get_step_range(step, topk)
        here = candidates.parents[:, begin:end] == parent
        here &= candidates.tokens[:, begin:end] == wanted[:, step, None]
        number = begin + here.int().argmax(1)  # at most one matches: siblings carry different tokens
        parent = torch.where(here.any(1), number, -2)[:, None]  # -2 is nobody's parent
        numbers.append(parent)
    return torch.cat(numbers, 1)


def find_step_leaders(scores: Tensor, steps: int, topk: int) -> Tensor:
    """scores [N, C] -> [N, S]: the number of each step's best candidate, which the tree holds iff it goes as deep."""
    numbers = torch.arange(scores.shape[1], device=scores.device)
    found = []
    for step in range(steps):
        begin, end = get_step_range(step, topk)
        here = scores[:, begin:end]
        best = here == here.amax(1, keepdim=True)
        found.append(torch.where(best, numbers[begin:end], MISSING_RANK).amin(1))
    return torch.stack(found, 1)


def rank_candidates(scores: Tensor, numbers: Tensor, steps: int, topk: int) -> Tensor:
    """scores [N, C] of candidates, numbers [N, D] of some of them, or negative -> rank [N, D, S] int32.

    rank[n, d, s] is how many candidates of the first s + 1 steps come before it, by (score descending, number ascending);
    NEVER where the number is negative. Of a step before its own it says nothing.
    """
    every = torch.arange(scores.shape[1], device=scores.device, dtype=torch.int32)
    rank = []
    for number in numbers.unbind(1):
        score = torch.gather(scores, 1, number.clamp(min=0)[:, None])
        before = (scores > score) | ((scores == score) & (every < number[:, None]))  # [N, C]
        first = before[:, :topk].sum(1, keepdim=True, dtype=torch.int32)
        later = before[:, topk:].unflatten(1, (steps - 1, -1)).sum(2, dtype=torch.int32) if steps > 1 else first[:, :0]
        by_step = torch.cat([first, later], 1).cumsum(1, dtype=torch.int32)  # [N, S]
        rank.append(torch.where(number[:, None] < 0, MISSING_RANK, by_step))
    return torch.stack(rank, 1)


def walk_cycles(accepted: Tensor, deep: Tensor, counts: Tensor, steps: int) -> WalkCounts:
    """The cycles of each tree: from the first place on, accept, step over the bonus token, and stand at the next.

    accepted [G, L + 1]: drafts if decoding stands at a place, those of all answers one behind the other, and one that is
    nobody's; deep likewise: the tree's depth there; counts [B] places of each answer.
    """
    stand = torch.zeros(len(accepted), len(counts), dtype=torch.int64, device=accepted.device)  # [G, B]
    total, cycles, depth = torch.zeros_like(stand), torch.zeros_like(stand), torch.zeros_like(stand)
    times = torch.zeros(
        *stand.shape, steps + 1, dtype=torch.int64, device=accepted.device
    )  # cycles that accepted s drafts
    begin = counts.cumsum(0) - counts
    for cycle in range(int(counts.max())):
        going = stand < counts
        if cycle % 16 == 15 and not bool(going.any()):  # a GPU is asked now and then only
            break
        here = begin + torch.minimum(stand, counts)
        step = torch.gather(accepted, 1, here).long()
        total += step * going
        cycles += going
        depth += torch.gather(deep, 1, here) * going
        times.scatter_add_(2, step[..., None], going[..., None].long())
        stand = torch.where(going, stand + step + 1, stand)
    reached = times.flip(2).cumsum(2).flip(2)[..., 1:]
    return WalkCounts(total.T, cycles.T, reached.transpose(0, 1), depth.T)


def mark_cycle_places(accepted: Tensor, counts: Tensor) -> Tensor:
    """[G, B, P] bool: the places that `walk_cycles` stands at, one for each cycle, P the most that an answer has. accepted and
    counts as there.
    """
    beyond = int(counts.max())  # one place more, for walks that have ended
    stood = torch.zeros(len(accepted), len(counts), beyond + 1, dtype=torch.bool, device=accepted.device)
    stand = torch.zeros(stood.shape[:2], dtype=torch.int64, device=accepted.device)  # [G, B]
    begin = counts.cumsum(0) - counts
    while bool((going := stand < counts).any()):
        stood.scatter_(2, torch.where(going, stand, beyond)[..., None], True)
        stand += torch.gather(accepted, 1, begin + torch.minimum(stand, counts)).long() + 1
    return stood[..., :beyond]


def _gather_following_tokens(ids: Tensor, ends: Tensor, steps: int) -> Tensor:
    """[B, T, S]: the answer's tokens after the bonus token of each p, -1 past the answer's end."""
    index = (
        torch.arange(ids.shape[1], device=ids.device)[:, None] + 2 + torch.arange(steps, device=ids.device)
    )  # [T, S]
    tokens = ids[:, index.clamp(max=ids.shape[1] - 1)]
    return torch.where(index < ends[:, None, None], tokens, -1)
