"""Exact replay: compute what every tree accepts from stored hidden states, without running the target (docs/trees.md).

At temperature 0 the target's answer does not depend on the draft, and the draft's proposals after token t depend only on the
tokens and features up to t. So expand once at *every* position of the answer, find how deep the answer stays within the
candidates, and walk: accept, step over the bonus token, repeat. One expansion per topk gives every smaller num_steps and
every num_draft_tokens: a node is in the tree (num_steps, topk, num_draft_tokens) iff fewer than num_draft_tokens - 1 of the
first num_steps steps' candidates precede it. The cost is that of positions and topks; one more tree costs two bytes a
position, and its walk.

Positions are not padded: those of all answers are concatenated, and expanded in batches that fit into memory.

Letters: B rows, T tokens, L positions of all answers, N positions of a batch, S num_steps, C candidates, D nodes to rank, G trees
of the grid, K topks, Q thresholds, X contexts.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from stages.data.row_lengths import assign_contexts
from stages.draft.eagle3 import (
    Eagle3Draft,
    MultimodalFeatures,
    attend_prefix_and_ancestors,
    build_prefix_mask,
    compute_first_state,
    encode_prefix,
)
from stages.hidden_states.format import HiddenStatesRow
from stages.params.tree_shape import SGLANG_SCORING, TreeShape, count_candidates
from stages.replay.oracle_bounds import (
    PATH_PROBABILITY_THRESHOLDS,
    choose_integer_type,
    evaluate_threshold_trees,
    find_fewest_cycles,
)
from stages.trees.draft_tree import TREE_SCORINGS, Candidates, check_tree, get_step_range
from stages.trees.expansion import MAX_INTERMEDIATE_ELEMENTS, expand_beams


@dataclass(frozen=True)
class ReplayBatch:
    """Rows of hidden states, padded on the right."""

    ids: Tensor  # [B, T] prompt and answer
    features: Tensor  # [B, T, K*H]
    starts: Tensor  # [B] index of each answer's first token
    ends: Tensor  # [B] index after its last
    multimodal: MultimodalFeatures | None = None  # of a multimodal target
    last: Tensor | None = None  # [B, T, H] after the final norm, where it is asked for
    names: Sequence[str] = ()  # of the rows

    @classmethod
    def collate(cls, rows: list[HiddenStatesRow], device: torch.device, keeps_last: bool = False) -> "ReplayBatch":
        return cls(
            ids=pad_sequence([r.ids.to(torch.int64) for r in rows], batch_first=True).to(device),
            features=pad_sequence([r.features for r in rows], batch_first=True).to(device),
            starts=torch.tensor([r.prompt_length for r in rows], device=device),
            ends=torch.tensor([len(r.ids) for r in rows], device=device),
            multimodal=_collate_multimodal(rows, device),
            last=pad_sequence([r.last for r in rows], batch_first=True).to(device) if keeps_last else None,
            names=[r.id for r in rows],
        )


def _collate_multimodal(rows: list[HiddenStatesRow], device: torch.device) -> MultimodalFeatures | None:
    """Collate the rows' multimodal features; None for a text target."""
    positions, pictured, visual = zip(
        *((r.positions, r.image_token_mask, r.image_embeddings) for r in rows), strict=True
    )
    if positions[0] is None:
        return None
    positions, pictured = (pad_sequence(list(t), batch_first=True) for t in (positions, pictured))
    return MultimodalFeatures(positions.to(device), pictured.to(device), torch.cat(visual).to(device))


MISSING_RANK = torch.iinfo(torch.int32).max  # the rank of a node that does not exist


class ContextCounts(NamedTuple):
    """Counts of each answer and tree by the tokens before the drafts: prompt and answer up to the root of the tree."""

    accepted: Tensor  # [B, G, X] drafts
    cycles: Tensor  # [B, G, X] verify cycles


class WalkCounts(NamedTuple):
    """Counts of each answer and tree, as integers."""

    accepted: Tensor  # [B, G] drafts
    cycles: Tensor  # [B, G] verify cycles
    cycles_reaching_depth: Tensor  # [B, G, S] cycles that accepted at least s + 1 drafts
    summed_tree_depth: Tensor  # [B, G] depths of the trees of those cycles, summed


class ReplayOutput(NamedTuple):
    """`WalkCounts` of the grid's trees, and the bounds on other trees from the same candidates (oracle_bounds.py)."""

    accepted: Tensor  # [B, G]
    cycles: Tensor  # [B, G]
    cycles_reaching_depth: Tensor  # [B, G, S]
    summed_tree_depth: Tensor  # [B, G]
    oracle_accepted: Tensor  # [B, G]
    oracle_cycles: Tensor  # [B, G]
    # Threshold trees: for each topk, ascending, each threshold, and its first 1, 2, ... steps: [B, K * Q * S, ...]. Their
    # summed_tree_depth holds the drafted nodes of the cycles' trees, summed.
    adaptive: WalkCounts
    by_context: ContextCounts
    cycle_starts: Tensor | None = None  # [W, B, P] bool: whether a cycle of each traced tree starts at a position


class ReplayCapacity(NamedTuple):
    """How much is processed at once."""

    tokens: int  # of rows, padding included
    positions: int


class PositionRange(NamedTuple):
    """Consecutive positions of one row: they share its keys."""

    row: int
    start: int  # p of the first: the last verified token before the bonus
    stop: int  # p after the last, and the number of tokens that the last one attends to


class PositionBatch(NamedTuple):
    """Position ranges that are expanded together."""

    ranges: list[PositionRange]
    row: Tensor  # [N] row of each position
    position: Tensor  # [N] its p
    range_offsets: Tensor  # index of each range's first position, and N

    @classmethod
    def build(cls, ranges: list[PositionRange], device: torch.device) -> "PositionBatch":
        row = torch.cat([torch.full((r.stop - r.start,), r.row) for r in ranges])
        position = torch.cat([torch.arange(r.start, r.stop) for r in ranges])
        offsets = torch.tensor([0, *(r.stop - r.start for r in ranges)]).cumsum(0)
        return cls(ranges, row.to(device), position.to(device), offsets.to(device))


class PositionTables:
    """Results at every position: those of all answers concatenated, and one padding entry at index L."""

    def __init__(self, trees: Sequence[TreeShape], num_positions: int, tree_scoring: str, device: torch.device):
        self.topks, self.num_steps = sorted({tree.topk for tree in trees}), max(tree.num_steps for tree in trees)
        thresholds = torch.tensor(PATH_PROBABILITY_THRESHOLDS, device=device)
        self.thresholds = TREE_SCORINGS[tree_scoring].score_probability(thresholds)  # [Q]
        # topk -> num_steps -> indices of the trees, and their numbers of drafted nodes
        self._trees: dict[int, dict[int, tuple[list[int], Tensor]]] = {topk: {} for topk in self.topks}
        groups = defaultdict(list)
        for g, tree in enumerate(trees):
            groups[tree.topk, tree.num_steps].append(g)
        for (topk, num_steps), chosen in groups.items():
            nodes = torch.tensor([trees[g].num_draft_tokens - 1 for g in chosen], device=device)
            self._trees[topk][num_steps] = chosen, nodes
        draft_type, node_type = _choose_count_types(trees)
        shape = len(self.topks), len(PATH_PROBABILITY_THRESHOLDS), self.num_steps, num_positions + 1
        self.accepted = torch.zeros(len(trees), num_positions + 1, dtype=draft_type, device=device)  # [G, L + 1] drafts
        self.tree_depth = torch.zeros_like(self.accepted)  # [G, L + 1]
        self.oracle_drafts = torch.zeros_like(self.accepted)  # [G, L + 1] accepted by the best tree of as many nodes
        self.threshold_accepted = torch.zeros(shape, dtype=draft_type, device=device)  # [K, Q, S, L + 1]
        self.threshold_nodes = torch.zeros(shape, dtype=node_type, device=device)  # [K, Q, S, L + 1]

    def fill_positions(self, positions: slice, topk: int, candidates: Candidates, following: Tensor) -> None:
        """Fill the `positions` of the trees of `topk`; following [N, S]: the answer's next tokens."""
        scores, numbers = candidates.scores, match_answer_path(candidates, following, topk)
        matching = rank_candidates(scores, numbers, self.num_steps, topk)
        leading = rank_candidates(scores, find_step_leaders(scores, self.num_steps, topk), self.num_steps, topk)
        dtype = self.accepted.dtype
        for s, (chosen, nodes) in self._trees[topk].items():
            self.accepted[chosen, positions] = (matching[:, :s, s - 1, None] < nodes).sum(1).T.to(dtype)
            self.tree_depth[chosen, positions] = (leading[:, :s, s - 1, None] < nodes).sum(1).T.to(dtype)
            on_path = (numbers[:, :s] >= 0).sum(1)
            self.oracle_drafts[chosen, positions] = torch.minimum(on_path, nodes[:, None]).to(dtype)
        table_index = self.topks.index(topk), ..., positions
        self.threshold_accepted[table_index], self.threshold_nodes[table_index] = evaluate_threshold_trees(
            scores, numbers, topk, self.thresholds
        )

    def walk(self, counts: Tensor, prompt_lengths: Tensor) -> ReplayOutput:
        """Walk every tree over the answers; counts [B]: positions of each answer, prompt_lengths [B]: tokens before it."""
        threshold_tables = self.threshold_accepted.flatten(0, 2), self.threshold_nodes.flatten(0, 2)
        adaptive, _ = walk_cycles(*threshold_tables, counts, self.num_steps)
        static, by_context = walk_cycles(self.accepted, self.tree_depth, counts, self.num_steps, prompt_lengths)
        oracle = find_fewest_cycles(self.oracle_drafts, counts, self.num_steps)
        return ReplayOutput(*static, *oracle, adaptive, by_context)


@torch.inference_mode()
def replay_answers(
    draft: Eagle3Draft,
    embedding: Tensor,  # [V, H]
    answers: ReplayBatch,
    trees: Sequence[TreeShape],
    tree_scoring: str = SGLANG_SCORING,  # a key of TREE_SCORINGS
    positions_per_batch: int = 1024,  # see `compute_capacity`
    traced: Sequence[int] = (),  # indices of W trees whose cycle starts are returned too
) -> ReplayOutput:
    """Replay every tree on every answer. Raises ValueError for a tree that can't be built."""
    for tree in trees:
        check_tree(tree, draft.config.draft_vocab_size, draft.config.sliding_window)
    ids, multimodal = answers.ids, answers.multimodal
    spans = zip((answers.starts - 1).tolist(), (answers.ends - 2).tolist(), strict=True)  # bonus token y_0 .. y_{n-2}
    ranges = [PositionRange(row, start, max(start, stop)) for row, (start, stop) in enumerate(spans)]
    counts = torch.tensor([r.stop - r.start for r in ranges], device=ids.device)
    tables, filled = PositionTables(trees, int(counts.sum()), tree_scoring, ids.device), 0
    fused, keys, values = encode_prefix(draft, ids, answers.features, embedding, multimodal)
    following = gather_following_tokens(ids, answers.ends, tables.num_steps)

    queries = draft.config.num_attention_heads * sum(tables.topks)  # of a position, at most
    longest = max(1, MAX_INTERMEDIATE_ELEMENTS[ids.device.type] // (queries * ids.shape[1]))
    for batch_ranges in _batch_ranges(ranges, longest, positions_per_batch):
        batch = PositionBatch.build(batch_ranges, ids.device)
        index = batch.row, batch.position
        rope_positions = draft.get_rope_positions(
            batch.position, None if multimodal is None else multimodal.positions[index]
        )
        bonus = embedding[ids[batch.row, batch.position + 1]]
        hidden = _compute_first_states(draft, batch, bonus, fused[index], rope_positions, keys, values)
        attend = partial(_attend_ranges, draft, batch, keys, values)
        expanded = expand_beams(
            draft, embedding, hidden, rope_positions, attend, tables.num_steps, tables.topks, tree_scoring
        )
        positions = slice(filled, filled := filled + len(batch.position))
        for topk, candidates in expanded.items():
            tables.fill_positions(positions, topk, candidates, following[index])
    output = tables.walk(counts, answers.starts)
    return output._replace(cycle_starts=mark_cycle_starts(tables.accepted[list(traced)], counts)) if traced else output


def _compute_first_states(
    draft: Eagle3Draft,
    batch: PositionBatch,
    embeds: Tensor,
    fused: Tensor,
    rope_positions: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Run step 0 at the positions of a batch -> state [N, H].

    embeds of the bonus tokens and fused features [N, H]; keys and values of all rows [B, T, G, E].
    """
    states = []
    for span, (i, j) in zip(batch.ranges, pairwise(batch.range_offsets.tolist()), strict=True):
        mask = build_prefix_mask(batch.position[None, i:j], span.stop, draft.config.sliding_window)
        k, v = (x[span.row, None, : span.stop] for x in (keys, values))
        states.append(
            compute_first_state(draft, embeds[None, i:j], fused[None, i:j], rope_positions[None, i:j], k, v, mask)[0]
        )
    return torch.cat(states)


def _attend_ranges(
    draft: Eagle3Draft, batch: PositionBatch, keys: Tensor, values: Tensor,
    step: int, index: Tensor, query: Tensor, own_k: Tensor, own_v: Tensor,
) -> Tensor:  # fmt: skip
    """Attend as a `StepAttention` over the rows' keys and values [B, T, G, E], each range up to its last position."""
    out, p = torch.empty_like(query), batch.position[index]
    offsets = torch.searchsorted(index, batch.range_offsets).tolist()
    for span, (i, j) in zip(batch.ranges, pairwise(offsets), strict=True):
        mask = build_prefix_mask(p[None, i:j], span.stop, draft.config.sliding_window, step)
        k, v = (x[span.row, None, : span.stop] for x in (keys, values))
        out[i:j] = attend_prefix_and_ancestors(query[None, i:j], k, v, mask, own_k[None, i:j], own_v[None, i:j])[0]
    return out


def compute_capacity(draft: Eagle3Draft, trees: Sequence[TreeShape], memory: int) -> ReplayCapacity:
    """Return how many tokens and positions fit into `memory` bytes, half of it for each, as if topks shared no node."""
    c, size = draft.config, draft.fc.weight.element_size()
    steps, topks = max(tree.num_steps for tree in trees), {tree.topk for tree in trees}
    cached = 2 * c.num_key_value_heads * c.head_dim
    token = (7 * c.hidden_size + 2 * cached) * size + count_table_bytes(trees)
    own_cached = 2 * steps * cached  # old and new
    layer = 8 * c.hidden_size + 3 * c.intermediate_size + 6 * c.num_attention_heads * c.head_dim
    node = (own_cached + layer) * size + 16 * max(topks)
    position = sum(topks) * node + count_candidate_bytes(trees)
    return ReplayCapacity(max(1, memory // 2 // token), max(1, memory // 2 // position))


def count_table_bytes(trees: Sequence[TreeShape]) -> int:
    """Return the bytes of `PositionTables` at one position, and of the tokens that follow it."""
    steps, topks = max(tree.num_steps for tree in trees), {tree.topk for tree in trees}
    drafts, nodes = (dtype.itemsize for dtype in _choose_count_types(trees))
    tables = 3 * drafts * len(trees) + (drafts + nodes) * len(topks) * len(PATH_PROBABILITY_THRESHOLDS) * steps
    return tables + 8 * steps


def count_candidate_bytes(trees: Sequence[TreeShape]) -> int:
    """Return the bytes of the candidates of one position, of all topks, and of their ranks."""
    steps, topks = max(tree.num_steps for tree in trees), {tree.topk for tree in trees}
    return sum(count_candidates(steps, k) for k in topks) * 24 + steps * steps * 16


def _choose_count_types(trees: Sequence[TreeShape]) -> tuple[torch.dtype, torch.dtype]:
    """Return the integer types in which `PositionTables` counts the drafts of a path, and the candidates of an expansion."""
    steps, topk = max(tree.num_steps for tree in trees), max(tree.topk for tree in trees)
    return choose_integer_type(steps), choose_integer_type(count_candidates(steps, topk))


def _batch_ranges(ranges: Sequence[PositionRange], longest: int, batch_size: int) -> Iterator[list[PositionRange]]:
    """Cut the ranges to at most `longest` positions, and yield batches of at most `batch_size` positions."""
    batch: list[PositionRange] = []
    room = batch_size
    for span in ranges:
        start = span.start
        while start < span.stop:
            stop = min(span.stop, start + min(longest, room))
            batch.append(PositionRange(span.row, start, stop))
            room, start = room - (stop - start), stop
            if not room:
                yield batch
                batch, room = [], batch_size
    if batch:
        yield batch


def match_answer_path(candidates: Candidates, following: Tensor, topk: int) -> Tensor:
    """Return the candidate numbers [N, S] of the nodes on the answer's path, -2 from the first token that no node matches.

    following [N, S]: the answer's next tokens, -1 past its end.
    """
    parent, numbers = torch.full_like(following[:, :1], -1), []
    for step in range(following.shape[1]):
        start, stop = get_step_range(step, topk)
        matches = candidates.parents[:, start:stop] == parent
        matches &= candidates.tokens[:, start:stop] == following[:, step, None]
        matched = start + matches.int().argmax(1)  # at most one matches: siblings carry different tokens
        parent = torch.where(matches.any(1), matched, -2)[:, None]  # no node has the parent -2
        numbers.append(parent)
    return torch.cat(numbers, 1)


def find_step_leaders(scores: Tensor, num_steps: int, topk: int) -> Tensor:
    """Return the number [N, S] of each step's best candidate, which the tree holds iff it is that deep; scores [N, C]."""
    numbers = torch.arange(scores.shape[1], device=scores.device)
    leaders = []
    for step in range(num_steps):
        start, stop = get_step_range(step, topk)
        of_step = scores[:, start:stop]
        is_best = of_step == of_step.amax(1, keepdim=True)
        leaders.append(torch.where(is_best, numbers[start:stop], MISSING_RANK).amin(1))
    return torch.stack(leaders, 1)


def rank_candidates(scores: Tensor, numbers: Tensor, num_steps: int, topk: int) -> Tensor:
    """Return the rank [N, D, S] int32 of candidates `numbers` [N, D] among scores [N, C].

    rank[n, d, s] counts the candidates of the first s + 1 steps that precede it, by (score descending, number ascending);
    MISSING_RANK where the number is negative. It means nothing for steps before the candidate's own.
    """
    all_numbers = torch.arange(scores.shape[1], device=scores.device, dtype=torch.int32)
    rank = []
    for number in numbers.unbind(1):
        score = torch.gather(scores, 1, number.clamp(min=0)[:, None])
        precedes = (scores > score) | ((scores == score) & (all_numbers < number[:, None]))  # [N, C]
        in_first_step = precedes[:, :topk].sum(1, keepdim=True, dtype=torch.int32)
        in_later_steps = in_first_step[:, :0]
        if num_steps > 1:
            in_later_steps = precedes[:, topk:].unflatten(1, (num_steps - 1, -1)).sum(2, dtype=torch.int32)
        by_step = torch.cat([in_first_step, in_later_steps], 1).cumsum(1, dtype=torch.int32)  # [N, S]
        rank.append(torch.where(number[:, None] < 0, MISSING_RANK, by_step))
    return torch.stack(rank, 1)


def walk_cycles(
    accepted: Tensor, tree_depth: Tensor, counts: Tensor, num_steps: int, prompt_lengths: Tensor | None = None
) -> tuple[WalkCounts, ContextCounts]:
    """Count the cycles of each tree: from an answer's first position on, accept, step over the bonus token, and go on from there.

    accepted, tree_depth [G, L + 1]: drafts accepted, and depth of the tree, of a cycle that starts at a position; positions of
    all answers are concatenated, with one padding entry at index L. counts [B]: positions of each answer. prompt_lengths [B];
    without them all cycles are of one context.
    """
    start = torch.zeros(len(accepted), len(counts), dtype=torch.int64, device=accepted.device)  # [G, B]
    depth, num_contexts = torch.zeros_like(start), 1
    if prompt_lengths is not None and len(counts):
        num_contexts += int(assign_contexts((prompt_lengths + counts).max()))
    # Cycles of a context that accepted s drafts.
    histogram = torch.zeros(*start.shape, num_contexts, num_steps + 1, dtype=torch.int64, device=accepted.device)
    offsets = counts.cumsum(0) - counts
    for cycle in range(int(counts.max())):
        active = start < counts
        if cycle % 16 == 15 and not bool(active.any()):  # a device sync, so only now and then
            break
        index = offsets + torch.minimum(start, counts)
        drafts = torch.gather(accepted, 1, index).long()
        depth += torch.gather(tree_depth, 1, index) * active
        counted = drafts
        if num_contexts > 1:
            counted = drafts + (num_steps + 1) * assign_contexts(prompt_lengths + torch.minimum(start, counts - 1) + 1)
        histogram.flatten(2).scatter_add_(2, counted[..., None], active[..., None].long())
        start = torch.where(active, start + drafts + 1, start)
    histogram = histogram.transpose(0, 1)  # [B, G, X, S + 1]
    by_context = ContextCounts((histogram * torch.arange(num_steps + 1, device=start.device)).sum(3), histogram.sum(3))
    reaching = histogram.sum(2).flip(2).cumsum(2).flip(2)[..., 1:]
    return WalkCounts(by_context.accepted.sum(2), by_context.cycles.sum(2), reaching, depth.T), by_context


def mark_cycle_starts(accepted: Tensor, counts: Tensor) -> Tensor:
    """Return [G, B, P] bool: the positions where the cycles of `walk_cycles` start, P the longest answer's number of positions.

    accepted and counts as for `walk_cycles`.
    """
    longest = int(counts.max())  # also the column of walks that have ended, cut off below
    marks = torch.zeros(len(accepted), len(counts), longest + 1, dtype=torch.bool, device=accepted.device)
    start = torch.zeros(marks.shape[:2], dtype=torch.int64, device=accepted.device)  # [G, B]
    offsets = counts.cumsum(0) - counts
    while bool((active := start < counts).any()):
        marks.scatter_(2, torch.where(active, start, longest)[..., None], True)
        start += torch.gather(accepted, 1, offsets + torch.minimum(start, counts)).long() + 1
    return marks[..., :longest]


def gather_following_tokens(ids: Tensor, ends: Tensor, num_steps: int) -> Tensor:
    """Return [B, T, S]: the answer's tokens after the bonus token of each p, -1 past the answer's end."""
    steps = torch.arange(num_steps, device=ids.device)
    index = torch.arange(ids.shape[1], device=ids.device)[:, None] + 2 + steps  # [T, S]
    tokens = ids[:, index.clamp(max=ids.shape[1] - 1)]
    return torch.where(index < ends[:, None, None], tokens, -1)
