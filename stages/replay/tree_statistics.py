"""Statistics inside the trees of a replay: which nodes were verified, the draft's probability of each, which were accepted.

`trace_cycles` grows a tree again wherever its walk started a cycle, and returns every cycle; `TreeStatistics` counts cycles in
buckets. Counts of a bucket can be added over batches, answers, checkpoints and machines. Definitions: docs/metrics.md

Letters: B rows, T tokens, P positions of a row's answer, C cycles of all rows, M num_draft_tokens with the root, N = M - 1.
"""

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stages.draft.eagle3 import Eagle3Draft, build_prefix_mask, compute_first_state, encode_prefix
from stages.params.tree_shape import SGLANG_SCORING, TreeShape
from stages.replay.replay import ReplayBatch, gather_following_tokens, match_answer_path
from stages.trees.draft_tree import Candidates, select_topk
from stages.trees.expansion import expand_candidates

TOKEN_CLASSES = ("structure", "digits", "letters")
STRUCTURE_CATEGORIES = ("P", "S", "Z", "C")  # Unicode's categories: punctuation, symbols, separators, controls
INCOMPLETE_CHARACTER = "\ufffd"  # some bytes of a letter, completed by other tokens


def classify_text(text: str) -> str:
    """Return the class of a token's text; an empty text is structure."""
    if any(c.isdigit() for c in text):
        return "digits"
    is_structure = (
        unicodedata.category(c).startswith(STRUCTURE_CATEGORIES) and c != INCOMPLETE_CHARACTER for c in text
    )
    return "structure" if all(is_structure) else "letters"


def classify_tokens(tokenizer: Any, ids: Iterable[int]) -> Tensor:
    """Return the index into TOKEN_CLASSES of each token up to the largest of `ids`; 0 for those not in `ids`.

    Special tokens are structure.
    """
    distinct_ids = sorted(set(ids))
    special = set(tokenizer.all_special_ids)
    found = torch.zeros(distinct_ids[-1] + 1, dtype=torch.int64)
    for token in distinct_ids:
        name = "structure" if token in special else classify_text(tokenizer.decode([token]))
        found[token] = TOKEN_CLASSES.index(name)
    return found


# Buckets of lengths, two per doubling, and of probabilities, finer where they are small.
LENGTH_EDGES = (0, 8, *(n for e in range(3, 21) for n in (3 * 2 ** (e - 1), 2 ** (e + 1))))
PROBABILITY_EDGES = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
MAX_ATTENTION_LOGITS = 1 << 27  # of some rows, or of some cycles of a long row
COUNT_COLUMNS = ("cycles", "nodes", "expected_accepted", "accepted")


class TreeCycles(NamedTuple):
    """Every cycle of one tree, and its nodes without the root, best first."""

    row: Tensor  # [C]
    root_position: Tensor  # [C] in its answer, whose first token is 0
    accepted: Tensor  # [C] drafts
    path_probability: Tensor  # [C, N] the draft's, of the path from the root to the node
    depth: Tensor  # [C, N] from 1
    sibling_rank: Tensor  # [C, N] among its parent's children, from 1
    accepted_nodes: Tensor  # [C, N] bool


@torch.inference_mode()
def trace_cycles(
    draft: Eagle3Draft,
    embedding: Tensor,  # [V, H]
    answers: ReplayBatch,
    cycle_starts: Tensor,  # [B, P] bool: ReplayOutput.cycle_starts of this tree
    tree: TreeShape,
    tree_scoring: str = SGLANG_SCORING,  # a key of TREE_SCORINGS
) -> TreeCycles:
    """Return the cycles of one tree, row by row."""
    row, position = cycle_starts.nonzero(as_tuple=True)  # [C]
    cycle = (cycle_starts.cumsum(1) - 1)[row, position]  # [C] index of the cycle in its row
    prompt_ends = answers.starts - 1  # [B] index of each prompt's last token
    verified = prompt_ends[:, None].repeat(1, max(int(cycle_starts.sum(1).max()), 1))  # [B, R] the last verified token
    verified[row, cycle] = prompt_ends[row] + position
    expanded = _expand_cycles(draft, embedding, answers, verified, tree, tree_scoring)
    index = row * verified.shape[1] + cycle  # [C]
    candidates = Candidates(expanded.scores[index], expanded.tokens[index], expanded.parents[index])

    following = gather_following_tokens(answers.ids, answers.ends, tree.num_steps)[row, verified[row, cycle]]  # [C, S]
    return describe_cycles(row, position, candidates, following, tree, tree_scoring)


def describe_cycles(
    row: Tensor,  # [C]
    position: Tensor,  # [C] of the root in its answer
    candidates: Candidates,  # of C trees
    following: Tensor,  # [C, S] the answer's tokens after each root, -1 past its end
    tree: TreeShape,
    tree_scoring: str = SGLANG_SCORING,  # that of the candidates
) -> TreeCycles:
    """Return the cycles whose trees are selected from these candidates."""
    topk = tree.topk
    score, nodes = select_topk(candidates.scores, tree.num_draft_tokens - 1)  # [C, N]
    depth = torch.where(nodes < topk, 1, (nodes - topk) // (topk * topk) + 2)
    path = match_answer_path(candidates, following, topk)  # [C, S]
    accepted = (nodes[..., None] == path[:, None]).any(-1)  # a tree holds the ancestors of each of its nodes
    return TreeCycles(
        row, position, accepted.sum(1), score.exp() if tree_scoring == "eagle" else score, depth,
        torch.where(nodes < topk, nodes, (nodes - topk) % topk) + 1, accepted,
    )  # fmt: skip


def _expand_cycles(
    draft: Eagle3Draft,
    embedding: Tensor,
    answers: ReplayBatch,
    verified: Tensor,  # [B, R] index of the last verified token before the bonus
    tree: TreeShape,
    tree_scoring: str,
) -> Candidates:
    """Expand the trees of R cycles of each row -> the candidates of B * R trees."""
    ids, multimodal = answers.ids, answers.multimodal
    fused, keys, values = encode_prefix(draft, ids, answers.features, embedding, multimodal)
    bonus = torch.gather(ids, 1, (verified + 1).clamp(max=ids.shape[1] - 1))
    stored = None
    if multimodal is not None:
        stored = torch.gather(multimodal.positions, 1, verified[..., None].expand(-1, -1, 3))
    positions = draft.get_rope_positions(verified, stored)
    parts = []
    cycles_at_once = max(1, MAX_ATTENTION_LOGITS // (draft.config.num_attention_heads * tree.topk * ids.shape[1]))
    for batch in _split_cycles(len(verified), verified.shape[1], cycles_at_once):
        rows = batch[0]
        mask = build_prefix_mask(verified[batch], ids.shape[1], draft.config.sliding_window)
        verified_states = torch.gather(fused[rows], 1, verified[batch][..., None].expand(-1, -1, fused.shape[-1]))
        context = positions[batch], keys[rows], values[rows], mask
        state = compute_first_state(draft, embedding[bonus[batch]], verified_states, *context)
        parts.append(expand_candidates(draft, embedding, state, *context, tree.num_steps, tree.topk, tree_scoring))
    columns = zip(*((c.scores, c.tokens, c.parents) for c in parts), strict=True)
    return Candidates(*(torch.cat(column) for column in columns))


def _split_cycles(num_rows: int, num_cycles: int, at_once: int) -> Iterator[tuple[slice, slice]]:
    """Yield rows and their cycles in order: whole rows, or of a row with more cycles than `at_once` a part."""
    rows_at_once = max(1, at_once // max(1, num_cycles))
    part = max(1, min(num_cycles, at_once))
    for row in range(0, num_rows, rows_at_once):
        for cycle in range(0, num_cycles, part):
            yield slice(row, min(num_rows, row + rows_at_once)), slice(cycle, min(num_cycles, cycle + part))


@dataclass(frozen=True)
class CountedBucket:
    """Counts of the cycles or nodes of a bucket; those that its grouping doesn't have are None."""

    by: str  # the grouping
    bucket: str
    cycles: int | None
    nodes: int | None
    expected_accepted: float | None
    accepted: int


class TreeStatistics:
    """Counts of one tree by (grouping, bucket): cycles, verified nodes, their summed path probabilities, accepted drafts.

    The groupings `row`, `context`, `answer`, `after` and `expected_accepted` count whole cycles; `depth`, `sibling`,
    `rank` and `path_probability` count nodes, without their cycles; `token` counts the answers' tokens.
    """

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], np.ndarray] = {}  # COUNT_COLUMNS, float64

    def add(
        self, cycles: TreeCycles, names: Sequence[str], ids: Tensor, starts: Tensor, ends: Tensor, classes: Tensor
    ) -> None:
        """Count cycles.

        names [B] of the rows; ids [B, T], starts, ends [B] as in a `ReplayBatch`; classes [V]: index into TOKEN_CLASSES of
        each token. All on the CPU.
        """
        root, probability = starts[cycles.row] + cycles.root_position, cycles.path_probability  # [C] index of the root
        lengths, probabilities = _name_buckets(LENGTH_EDGES), _name_buckets(PROBABILITY_EDGES)
        self._count_cycles("row", [names[r] for r in cycles.row.tolist()], cycles)
        for grouping, length in (("context", root + 1), ("answer", cycles.root_position)):
            self._count_cycles(grouping, [lengths[i] for i in _assign_buckets(length, LENGTH_EDGES).tolist()], cycles)
        self._count_cycles("after", [TOKEN_CLASSES[i] for i in classes[ids[cycles.row, root]].tolist()], cycles)
        expected = probability.double().sum(1).tolist()
        self._count_cycles("expected_accepted", [str(int(accepted)) for accepted in expected], cycles)
        rank = torch.arange(1, probability.shape[1] + 1).expand_as(probability)
        self._count_nodes("depth", cycles.depth, str, cycles)
        self._count_nodes("sibling", cycles.sibling_rank, str, cycles)
        self._count_nodes("rank", rank, str, cycles)
        buckets = _assign_buckets(probability, PROBABILITY_EDGES)
        self._count_nodes("path_probability", buckets, probabilities.__getitem__, cycles)
        self._count_tokens(cycles, root, ids, ends, classes)

    def list_buckets(self) -> Iterator[CountedBucket]:
        """Yield the buckets, in order."""
        for (grouping, bucket), counts in sorted(self.counts.items(), key=lambda item: _make_sort_key(*item[0])):
            cycles, nodes, expected_accepted, accepted = counts.tolist()
            yield CountedBucket(
                by=grouping,
                bucket=bucket,
                cycles=None if grouping in NODE_GROUPINGS else int(cycles),
                nodes=None if grouping == "token" else int(nodes),
                expected_accepted=None if grouping == "token" else expected_accepted,
                accepted=int(accepted),
            )

    def _count_cycles(self, grouping: str, buckets: Sequence[str], cycles: TreeCycles) -> None:
        expected_accepted, nodes = cycles.path_probability.double().sum(1), cycles.path_probability.shape[1]
        counts = zip(buckets, expected_accepted.tolist(), cycles.accepted.tolist(), strict=True)
        for bucket, expected, accepted in counts:
            self._count(grouping, bucket, 1, nodes, expected, accepted)

    def _count_nodes(self, grouping: str, buckets: Tensor, name: Callable[[int], str], cycles: TreeCycles) -> None:
        """Count nodes by the number [C, N] of each one's bucket, which `name` names."""
        values, bucket_index = np.unique(buckets.flatten().numpy(), return_inverse=True)
        probability, accepted = (t.double().flatten().numpy() for t in (cycles.path_probability, cycles.accepted_nodes))
        weights = np.ones_like(probability), probability, accepted
        sums = [np.bincount(bucket_index, each, len(values)) for each in weights]
        for index, value in enumerate(values.tolist()):
            self._count(grouping, name(value), 0, *(column[index] for column in sums))

    def _count_tokens(self, cycles: TreeCycles, root: Tensor, ids: Tensor, ends: Tensor, classes: Tensor) -> None:
        """Count each token of an answer but the first, which prefill samples, as an accepted draft or a bonus."""
        for row, start, accepted in zip(cycles.row.tolist(), root.tolist(), cycles.accepted.tolist(), strict=True):
            found = classes[ids[row, start + 1 : min(start + 2 + accepted, int(ends[row]))]]
            for index, token_class in enumerate(found.tolist()):
                self._count("token", TOKEN_CLASSES[token_class], int(index == accepted), 0, 0, int(index < accepted))

    def _count(self, grouping: str, bucket: str, *counts: float) -> None:
        self.counts.setdefault((grouping, bucket), np.zeros(len(COUNT_COLUMNS)))
        self.counts[grouping, bucket] += counts


NODE_GROUPINGS = ("depth", "sibling", "rank", "path_probability")
GROUPING_ORDER = ("row", "context", "answer", "after", "token", "expected_accepted", *NODE_GROUPINGS)


def _name_buckets(edges: Sequence[float]) -> list[str]:
    return [f"{low:.10g}-{high:.10g}" for low, high in pairwise(edges)]


def _assign_buckets(values: Tensor, edges: Sequence[float]) -> Tensor:
    """Return the index of each value's bucket between `edges`; a value on an edge is in the bucket above it."""
    return torch.bucketize(values, torch.tensor(edges[1:-1], dtype=values.dtype), right=True)


def _make_sort_key(grouping: str, bucket: str) -> tuple[int, float, str]:
    """Sort buckets of numbers by their lower end, others by name."""
    lower = float(bucket.split("-")[0]) if grouping not in ("row", "after", "token") else 0.0
    return GROUPING_ORDER.index(grouping), lower, bucket
