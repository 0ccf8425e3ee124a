"""Replay against the slow draft: for every position of an answer, build the tree by enumeration, and walk."""

import functools
import math
import random
from collections.abc import Callable

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from stages.params.tree_shape import TreeShape
from stages.replay.replay import ReplayBatch, replay_answers
from stages.trees.draft_tree import TREE_SCORINGS
from stages.trees.expansion import MAX_INTERMEDIATE_ELEMENTS
from tests.draft.slow_draft import CONFIG, OPTIONS, guess, random_draft


def make_answers(draft, embedding, count: int) -> list[tuple[list[int], torch.Tensor, int, int]]:
    """Rows (ids, features, start, end) whose answers mostly follow the draft's own first guesses, so that trees accept some."""
    rows = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        prompt, answer = 3 + seed % 3, 7 + seed % 4
        features = torch.randn(prompt + answer, 3 * CONFIG.hidden_size, generator=generator)
        ids = torch.randint(0, CONFIG.vocab_size, (prompt + 1,), generator=generator).tolist()
        for p in range(prompt - 1, prompt + answer - 2):
            best = guess(draft, embedding, ids, features, p, []).topk(3).indices
            choice = best[
                0 if torch.rand(1, generator=generator) < 0.6 else int(torch.randint(0, 3, (1,), generator=generator))
            ]
            ids.append(int(draft.to_target(choice)))
        rows.append((ids, features, prompt, prompt + answer))
    return rows


def pad_answers(rows: list[tuple[list[int], torch.Tensor, int, int]]) -> ReplayBatch:
    """Pad the rows of `make_answers`."""
    return ReplayBatch(
        pad_sequence([torch.tensor(r[0]) for r in rows], batch_first=True),
        pad_sequence([r[1] for r in rows], batch_first=True),
        torch.tensor([r[2] for r in rows]),
        torch.tensor([r[3] for r in rows]),
    )


def slow_tree(
    draft,
    probabilities_after: Callable[[tuple[int, ...]], torch.Tensor],
    steps: int,
    topk: int,
    tokens: int,
    tree_scoring: str,
) -> set[tuple[int, ...]]:
    """The paths of the tree drafted at a position, as SGLang grows it, with the slow draft; `eagle` adds logarithms."""
    found, beam = [], [(0.0 if tree_scoring == "eagle" else 1.0, (), -1)]
    for _ in range(steps):
        level = []
        for score, path, _ in beam:
            probs = probabilities_after(path)
            for i in sorted(range(len(probs)), key=lambda i: (-probs[i].item(), i))[:topk]:
                probability = probs[i].item()
                joined = score + math.log(probability) if tree_scoring == "eagle" else score * probability
                level.append((joined, (*path, int(draft.to_target(torch.tensor(i)))), len(found) + len(level)))
        found += level
        beam = sorted(level, key=lambda c: (-c[0], c[2]))[:topk]
    if topk == 1:
        return {c[1] for c in found}
    return {c[1] for c in sorted(found, key=lambda c: (-c[0], c[2]))[: tokens - 1]}


@pytest.mark.parametrize(
    ("topk", "options", "tree_scoring"),
    [
        *((k, "none", how) for how in TREE_SCORINGS for k in (1, 2, 3)),
        *((2, o, "sglang") for o in OPTIONS if o != "none"),
    ],
)
def test_replay_equals_building_every_tree_and_walking(topk: int, options: str, tree_scoring: str) -> None:
    draft, embedding, _ = random_draft(3, **OPTIONS[options])
    rows = make_answers(draft, embedding, 3)
    shapes = [(s, s + 1) for s in (1, 2, 4)] if topk == 1 else [(1, 3), (3, 5), (3, 8), (4, 8)]
    trees = [TreeShape(s, topk, m) for s, m in shapes]
    accepted, cycles, reached, deep = replay_answers(
        draft, embedding, pad_answers(rows), trees, tree_scoring=tree_scoring
    )[:4]
    assert accepted.sum() > 5, "nothing is accepted, so nothing is tested"

    @functools.cache  # trees of one position begin alike
    def probabilities(b: int, p: int, path: tuple[int, ...]) -> torch.Tensor:
        return guess(draft, embedding, *rows[b][:2], p, list(path))

    for b, (ids, _, start, end) in enumerate(rows):
        for g, tree in enumerate(trees):
            steps, tokens = tree.num_steps, tree.num_draft_tokens
            bonus, total, count, levels, reached_depths = start, 0, 0, 0, [0] * reached.shape[2]
            while bonus < end - 1:
                paths = slow_tree(
                    draft, functools.partial(probabilities, b, bonus - 1), steps, topk, tokens, tree_scoring
                )
                depth = 0
                while bonus + depth + 1 < end and tuple(ids[bonus + 1 : bonus + depth + 2]) in paths:
                    depth += 1
                total, count, bonus = total + depth, count + 1, bonus + depth + 1
                levels += max(map(len, paths))
                reached_depths = [n + (depth > d) for d, n in enumerate(reached_depths)]
            found = accepted[b, g].item(), cycles[b, g].item(), deep[b, g].item(), reached[b, g].tolist()
            assert found == (total, count, levels, reached_depths), (b, steps, topk, tokens)


@pytest.mark.parametrize("tree_scoring", list(TREE_SCORINGS))
def test_trees_replayed_together_equal_trees_replayed_alone(tree_scoring: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All topks expanded together, in parts of three positions and blocks of two, and each tree in a call of its own."""
    draft, embedding, _ = random_draft(5, sliding_window=6)
    rows = make_answers(draft, embedding, 5)
    inputs = embedding, pad_answers(rows)
    grid = [(s, k, m) for k in (1, 2, 4) for s in (1, 3, 5) for m in (2, 3, 8, 20)]
    trees = [TreeShape(s, k, m) for s, k, m in grid if m - 1 <= k + (s - 1) * k * k]
    random.Random(0).shuffle(trees)
    separate = [replay_answers(draft, *inputs, [shape], tree_scoring=tree_scoring) for shape in trees]
    num_elements = draft.config.num_attention_heads * 7 * inputs[1].ids.shape[1]
    monkeypatch.setitem(MAX_INTERMEDIATE_ELEMENTS, "cpu", 2 * num_elements)
    together = replay_answers(draft, *inputs, trees, tree_scoring=tree_scoring, positions_per_batch=3)
    for name in ("accepted", "cycles", "summed_tree_depth", "oracle_accepted", "oracle_cycles"):
        assert torch.equal(getattr(together, name), torch.cat([getattr(output, name) for output in separate], 1)), name
    for g, output in enumerate(separate):
        assert (
            together.cycles_reaching_depth[:, g, : output.cycles_reaching_depth.shape[2]].tolist()
            == output.cycles_reaching_depth[:, 0].tolist()
        )
    assert together.accepted.sum() > 50
