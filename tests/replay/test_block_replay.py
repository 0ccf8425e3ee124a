"""Replay of block drafts against decoding with the slow draft and a small target, and against enumerated trees."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from stages.families.block.exact_replay import AnswerPositions, ReplayPack, compute_anchor_states, replay_block_trees
from stages.families.block.model import BlockDraft
from stages.params.tree_shape import TreeShape
from tests.draft.slow_block_draft import METHOD_OPTIONS, greedy_block, logits_after, random_block_draft
from tests.draft.slow_draft import small_target

VOCAB = 5  # so few tokens that random drafts are often right
FEATURES = (1, 2, 4)  # the layers whose input the draft reads
PROMPTS = ([1], [3, 0, 2], [2, 2, 1, 0], [0, 3])
ANSWER_LENGTHS = (14, 1, 9, 12)  # one without a cycle
every_method = pytest.mark.parametrize("method", ["dflash", "dflash_windows", "dflash2", "dspark"])
seeds = pytest.mark.parametrize("seed", [3, 8, 9])


class Case:
    """A target, its greedy answers, and a draft that reads it."""

    def __init__(self, method: str, seed: int):
        self.target = small_target(VOCAB, seed).double()
        self.embedding, self.head = self.target.model.embed_tokens.weight, self.target.lm_head.weight
        options: dict[str, Any] = {"vocab_size": VOCAB, "mask_token_id": 3, "block_size": 5, "feature_layers": FEATURES}
        self.draft: BlockDraft = random_block_draft(seed + 10, **METHOD_OPTIONS[method], **options)[0]
        self._read_once, self._draft_once = (
            cache(self._read),
            cache(self._draft),
        )  # every width and tree reads the same rows
        self.rows = [self.answer(p, n) for p, n in zip(PROMPTS, ANSWER_LENGTHS, strict=True)]
        lengths = torch.tensor([len(row) for row in self.rows])
        offsets = lengths.cumsum(0) - lengths
        self.ids = torch.tensor([token for row in self.rows for token in row])
        self.features = torch.cat([self.read(row)[0] for row in self.rows])
        self.positions = torch.cat([torch.arange(n) for n in lengths.tolist()])
        self.documents = torch.arange(len(lengths)).repeat_interleave(lengths)
        starts = offsets + torch.tensor([len(p) for p in PROMPTS])
        bounds = offsets, starts, offsets + lengths
        self.answer_positions = AnswerPositions.build(self.ids, *bounds, self.draft.config.num_drafts)
        self.states = compute_anchor_states(
            self.draft,
            self.embedding,
            ReplayPack(self.ids, self.features, self.positions, self.documents),
            self.answer_positions.anchors,
            7,
        )
        self.anchor_tokens = self.answer_positions.anchor_tokens

    def read(self, ids: list[int]) -> tuple[Tensor, list[int]]:
        """Features [n, K*H] and the next token after each."""
        return self._read_once(tuple(ids))

    def _read(self, ids: tuple[int, ...]) -> tuple[Tensor, list[int]]:
        with torch.inference_mode():
            out = self.target(torch.tensor([ids]), output_hidden_states=True)
        return torch.cat([out.hidden_states[i][0] for i in FEATURES], -1), out.logits[0].argmax(-1).tolist()

    def draft_greedily(self, row: list[int]) -> list[int]:
        """Return the slow draft's whole block after `row`, whose last token is the anchor: it has no features yet."""
        return self._draft_once(tuple(row))

    def _draft(self, row: tuple[int, ...]) -> list[int]:
        features = self.read(list(row[:-1]))[0]
        return greedy_block(self.draft, self.embedding, self.head, list(row), features, len(row) - 1)

    def answer(self, prompt: list[int], count: int) -> list[int]:
        row = list(prompt)
        for _ in range(count):
            row.append(self.read(row)[1][-1])
        return row

    def decode(self, prompt: list[int], count: int, width: int) -> list[int]:
        """Decode with the slow draft and return the drafts that each cycle accepts, cut at the answer's end."""
        row, accepted = [*prompt, self.read(prompt)[1][-1]], []
        while len(row) < len(prompt) + count:
            drafts = self.draft_greedily(row)[:width]
            following = self.read(row + drafts)[1][len(row) - 1 :]
            j = 0
            while j < width and drafts[j] == following[j]:
                j += 1
            remaining = len(prompt) + count - len(row)
            accepted.append(min(j, remaining))
            row += [*drafts[:j], following[j]][:remaining]
        assert row == self.answer(prompt, count)
        return accepted


case_of = cache(Case)


@every_method
@seeds
def test_every_width_equals_live_decoding(method: str, seed: int) -> None:
    case = case_of(method, seed)
    chains = [TreeShape(width, 1, width + 1) for width in range(1, case.draft.config.num_drafts + 1)]
    walk = replay_block_trees(case.draft, case.head, case.states, case.answer_positions, chains)
    reaching = torch.cat([walk.cycles[..., None], walk.cycles_reaching_depth], -1)
    histogram = reaching - torch.nn.functional.pad(walk.cycles_reaching_depth, (0, 1))
    for width in range(1, case.draft.config.num_drafts + 1):
        for row, (prompt, count) in enumerate(zip(PROMPTS, ANSWER_LENGTHS, strict=True)):
            live = case.decode(prompt, count, width)
            assert int(walk.cycles[row, width - 1]) == len(live)
            assert int(walk.accepted[row, width - 1]) == sum(live)
            expected = [live.count(j) for j in range(case.draft.config.num_drafts + 1)]
            assert histogram[row, width - 1].tolist() == expected
            assert int(walk.summed_tree_depth[row, width - 1]) == width * len(live)
    assert int(walk.accepted.sum()) > 10, "drafts are never right: the comparison says nothing"


def slow_tree(case: Case, index: int, levels: int, topk: int, count: int, beam: int | None) -> list[tuple[int, ...]]:
    """The `count` most probable paths of up to `levels` tokens; of a level only the best `beam` go on, all for None."""
    level, paths = [(1.0, (int(case.anchor_tokens[index]),))], []
    for d in range(levels):
        longer = []
        for probability, path in sorted(level, reverse=True)[:beam]:
            logits = logits_after(case.draft, case.head, case.states[index, d], path[-1])
            children = sorted(((p, t) for t, p in enumerate(torch.softmax(logits, 0).tolist())), reverse=True)[:topk]
            longer += [(probability * p, (*path, t)) for p, t in children]
        paths += longer
        level = longer
    return [path[1:] for _, path in sorted(paths, reverse=True)[:count]]


@every_method
@seeds
@pytest.mark.parametrize(
    ("levels", "topk", "sizes", "beam"),
    [
        (4, 3, range(2, 9), None),
        (4, 3, (9, 14, 31), 3),
        (3, 2, (2, 4, 6), None),
        (2, 4, (6, 21), 4),
        (1, 4, (2, 5), None),
    ],
)
def test_trees_equal_enumerated_ones(
    method: str, seed: int, levels: int, topk: int, sizes: Any, beam: int | None
) -> None:
    """Best-first over every path where the tree has at most 2 K + 1 nodes, and over those of the beams with more."""
    case = case_of(method, seed)
    trees = [TreeShape(levels, topk, m) for m in sizes]
    found = replay_block_trees(case.draft, case.head, case.states, case.answer_positions, trees)
    for g, tree in enumerate(trees):
        accepted = []
        for index, following in enumerate(case.answer_positions.following.tolist()):
            paths = set(slow_tree(case, index, levels, topk, tree.num_draft_tokens - 1, beam))
            accepted.append(max(d for d in range(levels + 1) if d == 0 or tuple(following[:d]) in paths))
        offset = 0
        for row, count in enumerate(case.answer_positions.counts.tolist()):
            position, cycles, total = 0, 0, 0
            while position < count:
                cycles, total, position = (
                    cycles + 1, total + accepted[offset + position], position + accepted[offset + position] + 1,
                )  # fmt: skip
            assert (int(found.cycles[row, g]), int(found.accepted[row, g])) == (cycles, total), tree.name
            offset += count


@every_method
def test_the_head_is_read_once_for_many_positions(method: str) -> None:
    """Bug: of states [n, 1, H], a view, torch made n products, each of which read the head: 290 s for 480 answers on an H200."""
    case = Case(method, 3)
    head = case.head.detach()  # as in the stage: of one with a gradient torch makes one product
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        replay_block_trees(case.draft, head, case.states, case.answer_positions, [TreeShape(3, 2, 6)])
    products = [one.input_shapes[1][1:] for one in profiler.events() if one.name == "aten::bmm"]
    assert list(head.T.shape) not in products
