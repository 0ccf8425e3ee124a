"""Inside the trees of a replay: which nodes were verified, how sure the draft was of each, which the answer took.

`trace_cycles` grows a tree once more where its walk stood, and says all of every cycle; `TreeStatistics` adds cycles up by buckets whose
counts pool: over batches here, and over answers, checkpoints or machines by whoever reads them. docs/metrics.md

Letters: B rows, T tokens, P places of a row's answer, C cycles of all rows, M num_draft_tokens with the root, N = M - 1.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stages.draft.eagle3 import Eagle3Draft, MultimodalFeatures, build_prefix_mask, compute_first_state, encode_prefix
from stages.replay.token_classes import TOKEN_CLASSES
from stages.trees.draft_tree import Candidates, select_topk
from stages.trees.expansion import expand_candidates

# Buckets of lengths, two to a doubling, and of chances, finer where guesses are poor.
LENGTH_EDGES = (0, 8, *(n for e in range(3, 21) for n in (3 * 2 ** (e - 1), 2 ** (e + 1))))
PROBABILITY_EDGES = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
MAX_ATTENTION_LOGITS = 1 << 27  # attention logits that are made at once
COUNT_COLUMNS = ("cycles", "nodes", "promised", "accepted")


class TreeCycles(NamedTuple):
    """Every cycle of one tree, and its nodes but the root, the best first."""

    row: Tensor  # [C]
    place: Tensor  # [C] of the root in its answer; the answer's first token is 0
    accepted: Tensor  # [C] drafts
    chance: Tensor  # [C, N] the draft's own, that the answer comes by here
    depth: Tensor  # [C, N] from 1
    sibling: Tensor  # [C, N] rank among its parent's children, from 1
    level: Tensor  # [C, N] rank among the nodes of its depth, from 1
    taken: Tensor  # [C, N] bool: accepted


@torch.inference_mode()
def trace_cycles(
    draft: Eagle3Draft,
    embedding: Tensor,  # [V, H]
    ids: Tensor,  # [B, T] prompt and answer, right-padded
    features: Tensor,  # [B, T, 3H]
    starts: Tensor,  # [B] index of each answer's first token
    ends: Tensor,  # [B] index after its last
    stood: Tensor,  # [B, P] bool: as `replay` tells it of this tree
    shape: tuple[int, int, int],  # num_steps, topk, num_draft_tokens
    seen: MultimodalFeatures | None = None,  # of a target that sees
    semantics: str = "sglang",  # of tree.SEMANTICS
) -> TreeCycles:
    """The cycles of one tree, row by row."""
    steps, topk, tokens = shape
    row, place = stood.nonzero(as_tuple=True)  # [C]
    number = (stood.cumsum(1) - 1)[row, place]  # [C] of the cycle in its row
    where = (starts - 1)[:, None].repeat(1, max(int(stood.sum(1).max()), 1))  # [B, most] the last verified token
    where[row, number] = (starts - 1)[row] + place
    every = expand_at_places(draft, embedding, ids, features, where, steps, topk, seen, semantics)
    mine = row * where.shape[1] + number  # [C]
    candidates = Candidates(every.scores[mine], every.tokens[mine], every.parents[mine])

    score, nodes = select_topk(candidates.scores, tokens - 1)  # [C, N]
    depth = torch.where(nodes < topk, 1, (nodes - topk) // (topk * topk) + 2)
    taken = _mark_accepted_nodes(candidates, nodes, _gather_following_tokens(ids, where[row, number], row, ends, steps))
    return TreeCycles(
        row, place, taken.sum(1), score.exp() if semantics == "eagle" else score, depth,
        torch.where(nodes < topk, nodes, (nodes - topk) % topk) + 1, _rank_within_depth(depth), taken,
    )  # fmt: skip


def expand_at_places(
    draft: Eagle3Draft, embedding: Tensor, ids: Tensor, features: Tensor,
    where: Tensor,  # [B, most] index of the last verified token before the bonus
    steps: int, topk: int, seen: MultimodalFeatures | None, semantics: str,
) -> Candidates:  # fmt: skip
    """What is drafted at some places of each row: candidates of B * most trees."""
    fused, keys, values = encode_prefix(draft, ids, features, embedding, seen)
    allowed = build_prefix_mask(where, ids.shape[1], draft.config.sliding_window)
    bonus = torch.gather(ids, 1, (where + 1).clamp(max=ids.shape[1] - 1))
    picked = torch.gather(fused, 1, where[..., None].expand(-1, -1, fused.shape[-1]))
    theirs = None if seen is None else torch.gather(seen.positions, 1, where[..., None].expand(-1, -1, 3))
    positions = draft.get_rope_positions(where, theirs)
    found = []
    for rows in torch.arange(len(ids)).split(
        max(1, MAX_ATTENTION_LOGITS // (draft.config.num_attention_heads * topk * allowed[0].numel()))
    ):
        here = slice(int(rows[0]), int(rows[-1]) + 1)
        given = positions[here], keys[here], values[here], allowed[here]
        state = compute_first_state(draft, embedding[bonus[here]], picked[here], *given)
        found.append(expand_candidates(draft, embedding, state, *given, steps, topk, semantics))
    return Candidates(
        *(torch.cat(parts) for parts in zip(*((c.scores, c.tokens, c.parents) for c in found), strict=True))
    )


def _gather_following_tokens(ids: Tensor, where: Tensor, row: Tensor, ends: Tensor, steps: int) -> Tensor:
    """[C, S]: the answer's tokens after the bonus token of each cycle, -1 past the answer's end."""
    index = where[:, None] + 2 + torch.arange(steps, device=ids.device)
    return torch.where(index < ends[row, None], ids[row[:, None], index.clamp(max=ids.shape[1] - 1)], -1)


def _mark_accepted_nodes(candidates: Candidates, nodes: Tensor, wanted: Tensor) -> Tensor:
    """[C, N] bool: the nodes on the answer's path, from the root down to where the tree has no more of it."""
    tokens, parents = torch.gather(candidates.tokens, 1, nodes), torch.gather(candidates.parents, 1, nodes)
    taken = torch.zeros_like(nodes, dtype=torch.bool)
    last = torch.full_like(nodes[:, :1], -1)  # the root
    for token in wanted.T:
        here = (parents == last) & (tokens == token[:, None])  # at most one: siblings carry different tokens
        taken |= here
        last = torch.where(here, nodes, -2).amax(1, keepdim=True)  # -2 is nobody's parent
    return taken


def _rank_within_depth(depth: Tensor) -> Tensor:
    """[C, N]: how many of a depth there are up to each node, where the best come first."""
    levels = torch.arange(1, int(depth.max()) + 1 if depth.numel() else 1, device=depth.device)
    counted = (depth[..., None] == levels).cumsum(1)  # [C, N, S]
    return torch.gather(counted, 2, depth[..., None] - 1)[..., 0] if depth.numel() else depth


class TreeStatistics:
    """Counts of one tree by (what, bucket): cycles, nodes verified, the chances that the draft gave them, drafts accepted.

    Whole cycles go into the buckets of `row`, `context`, `answer`, `after` and `promise`; nodes, without their cycle, into
    those of `depth`, `sibling`, `level`, `rank` and `chance`; the answers' tokens into those of `token`.
    """

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], np.ndarray] = {}  # -> COUNTS, float64

    def add(
        self, cycles: TreeCycles, names: Sequence[str], ids: Tensor, starts: Tensor, ends: Tensor, kind: Tensor
    ) -> None:
        """names [B] of the rows; ids [B, T], starts, ends [B] as in `trace_cycles`; kind [V] index into KINDS. All on the CPU."""
        root = starts[cycles.row] + cycles.place  # [C] index of the root
        self._cycles("row", [names[r] for r in cycles.row.tolist()], cycles)
        lengths = _name_buckets(LENGTH_EDGES)
        self._cycles("context", [lengths[i] for i in _assign_buckets(root + 1, LENGTH_EDGES).tolist()], cycles)
        self._cycles("answer", [lengths[i] for i in _assign_buckets(cycles.place, LENGTH_EDGES).tolist()], cycles)
        self._cycles("after", _name_token_classes(kind[ids[cycles.row, root]]), cycles)
        self._cycles("promise", [str(int(sure)) for sure in cycles.chance.double().sum(1).tolist()], cycles)
        for what in ("depth", "sibling", "level"):
            self._nodes(what, getattr(cycles, what), str, cycles)
        rank = torch.arange(1, cycles.chance.shape[1] + 1).expand_as(cycles.chance)
        self._nodes("rank", rank, str, cycles)
        self._nodes(
            "chance",
            _assign_buckets(cycles.chance, PROBABILITY_EDGES),
            _name_buckets(PROBABILITY_EDGES).__getitem__,
            cycles,
        )
        self._tokens(cycles, root, ids, ends, kind)

    def rows(self) -> Iterator[dict[str, Any]]:
        """A line for each bucket, in order; cycles, nodes and promised None where they aren't of the bucket's kind."""
        for (what, bucket), counts in sorted(self.found.items(), key=lambda item: _make_sort_key(*item[0])):
            cycles, nodes, promised, accepted = counts.tolist()
            yield {
                "by": what,
                "bucket": bucket,
                "cycles": None if what in NODE_GROUPINGS else int(cycles),
                "nodes": None if what == "token" else int(nodes),
                "promised": None if what == "token" else promised,
                "accepted": int(accepted),
            }

    def _cycles(self, what: str, buckets: Sequence[str], cycles: TreeCycles) -> None:
        promised, nodes = cycles.chance.double().sum(1), cycles.chance.shape[1]
        for bucket, promise, accepted in zip(buckets, promised.tolist(), cycles.accepted.tolist(), strict=True):
            self._count(what, bucket, 1, nodes, promise, accepted)

    def _nodes(self, what: str, buckets: Tensor, name: Callable[[int], str], cycles: TreeCycles) -> None:
        """buckets [C, N]: the number of each node's, which `name` names."""
        values, place = np.unique(buckets.flatten().numpy(), return_inverse=True)
        chance, taken = (t.double().flatten().numpy() for t in (cycles.chance, cycles.taken))
        sums = [np.bincount(place, weights, len(values)) for weights in (np.ones_like(chance), chance, taken)]
        for number, value in enumerate(values.tolist()):
            self._count(what, name(value), 0, *(of[number] for of in sums))

    def _tokens(self, cycles: TreeCycles, root: Tensor, ids: Tensor, ends: Tensor, kind: Tensor) -> None:
        """Each token of an answer but the first, which is prefill's: a draft accepted, or a bonus, the target's own word."""
        for row, at, accepted in zip(cycles.row.tolist(), root.tolist(), cycles.accepted.tolist(), strict=True):
            said = _name_token_classes(kind[ids[row, at + 1 : min(at + 2 + accepted, int(ends[row]))]])
            for number, name in enumerate(said):
                self._count("token", name, int(number == accepted), 0, 0, int(number < accepted))

    def _count(self, what: str, bucket: str, *counts: float) -> None:
        self.found.setdefault((what, bucket), np.zeros(len(COUNT_COLUMNS)))
        self.found[what, bucket] += counts


NODE_GROUPINGS = ("depth", "sibling", "level", "rank", "chance")
GROUPING_ORDER = ("row", "context", "answer", "after", "token", "promise", *NODE_GROUPINGS)


def _name_buckets(edges: Sequence[float]) -> list[str]:
    return [f"{low:.10g}-{high:.10g}" for low, high in pairwise(edges)]


def _assign_buckets(values: Tensor, edges: Sequence[float]) -> Tensor:
    """Which of the buckets between `edges` each value lies in; one that is an edge, in that above it."""
    return torch.bucketize(values, torch.tensor(edges[1:-1], dtype=values.dtype), right=True)


def _name_token_classes(values: Tensor) -> list[str]:
    return [TOKEN_CLASSES[i] for i in values.tolist()]


def _make_sort_key(what: str, bucket: str) -> tuple[int, float, str]:
    """Buckets of numbers by their lower end, others by name."""
    number = bucket.split("-")[0]
    return GROUPING_ORDER.index(what), float(number) if what not in ("row", "after", "token") else 0.0, bucket
