"""Inside a replay against the slow draft: every cycle's tree by enumeration, its nodes' ranks and what the answer takes."""

import math
from typing import NamedTuple

import pytest
import torch

from stages.params.tree_shape import TreeShape
from stages.replay import tree_statistics
from stages.replay.replay import replay_answers
from stages.replay.tree_statistics import TOKEN_CLASSES, TreeCycles, trace_cycles
from tests.draft.slow_draft import OPTIONS, guess, random_draft
from tests.replay.test_replay import make_answers, pad_answers


class Node(NamedTuple):
    score: float
    path: tuple[int, ...]
    sibling: int
    number: int


def slow_nodes(draft, embedding, ids, features, p: int, shape: TreeShape, tree_scoring: str) -> list[Node]:
    """The nodes of the tree drafted at p, the best first."""
    steps, topk, tokens = shape.num_steps, shape.topk, shape.num_draft_tokens
    found: list[Node] = []
    beam = [Node(0.0 if tree_scoring == "eagle" else 1.0, (), 0, -1)]
    for _ in range(steps):
        level: list[Node] = []
        for parent in beam:
            probabilities = guess(draft, embedding, ids, features, p, list(parent.path))
            likeliest = sorted(range(len(probabilities)), key=lambda i: (-probabilities[i].item(), i))[:topk]
            for rank, i in enumerate(likeliest, 1):
                probability = probabilities[i].item()
                score = parent.score + math.log(probability) if tree_scoring == "eagle" else parent.score * probability
                token = int(draft.to_target(torch.tensor(i)))
                level.append(Node(score, (*parent.path, token), rank, len(found) + len(level)))
        found += level
        beam = sorted(level, key=lambda n: (-n.score, n.number))[:topk]
    return sorted(found, key=lambda n: (-n.score, n.number))[: tokens - 1]


def trace_rows(draft, embedding, rows, shape: TreeShape, tree_scoring: str) -> TreeCycles:
    inputs = draft, embedding, pad_answers(rows)
    found = replay_answers(*inputs, [TreeShape(1, shape.topk, 2), shape], tree_scoring=tree_scoring, traced=[1])
    assert found.cycle_starts is not None
    cycles = trace_cycles(*inputs, found.cycle_starts[0], shape, tree_scoring=tree_scoring)
    assert torch.equal(torch.bincount(cycles.row, cycles.accepted.double(), len(rows)).long(), found.accepted[:, 1])
    assert torch.equal(torch.bincount(cycles.row, minlength=len(rows)), found.cycles[:, 1])
    return cycles


@pytest.mark.parametrize(
    ("shape", "options", "tree_scoring"),
    [
        (TreeShape(4, 1, 5), "none", "sglang"), (TreeShape(3, 2, 5), "none", "sglang"), (TreeShape(4, 3, 9), "none", "eagle"),
        (TreeShape(3, 3, 16), "none", "sglang"), (TreeShape(3, 2, 8), "window", "sglang"),
        (TreeShape(1, 3, 3), "eagle31", "sglang"),
    ],
)  # fmt: skip
def test_every_cycle_holds_the_nodes_of_an_enumerated_tree(shape: TreeShape, options: str, tree_scoring: str) -> None:
    draft, embedding, _ = random_draft(3, **OPTIONS[options])
    rows = make_answers(draft, embedding, 4)
    cycles = trace_rows(draft, embedding, rows, shape, tree_scoring)
    assert cycles.accepted_nodes.sum() > 5, "nothing is accepted, so nothing is tested"
    index = 0
    for row, (ids, features, start, end) in enumerate(rows):
        bonus = start
        while bonus < end - 1:
            nodes = slow_nodes(draft, embedding, ids, features, bonus - 1, shape, tree_scoring)
            accepted = [tuple(ids[bonus + 1 : bonus + 1 + len(n.path)]) == n.path for n in nodes]
            cycle = {k: getattr(cycles, k)[index].tolist() for k in TreeCycles._fields}
            assert (cycle["row"], cycle["root_position"], cycle["accepted"]) == (row, bonus - start, sum(accepted))
            assert cycle["depth"] == [len(n.path) for n in nodes]
            assert cycle["sibling_rank"] == [n.sibling for n in nodes]
            assert cycle["accepted_nodes"] == accepted
            probabilities = [math.exp(n.score) if tree_scoring == "eagle" else n.score for n in nodes]
            assert cycle["path_probability"] == pytest.approx(probabilities, rel=1e-4)
            index, bonus = index + 1, bonus + sum(accepted) + 1
    assert index == len(cycles.row)


@pytest.mark.parametrize(
    ("text", "kind"),
    [("12", "digits"), (" -3", "digits"), ("\n  ", "structure"), ("]{", "structure"), ("", "structure"), ("€", "structure"),
     (" rain", "letters"), ("雨", "letters"), ("�", "letters"), ("a1", "digits"), ("x:", "letters")],
)  # fmt: skip
def test_kinds_of_text(text: str, kind: str) -> None:
    assert tree_statistics.classify_text(text) == kind


def test_kinds_of_tokens_are_those_of_their_texts() -> None:
    class Spelling:
        all_special_ids = (0,)

        def decode(self, ids: list[int]) -> str:
            return ["<end>", ",", "7", "Oslo"][ids[0]]

    found = tree_statistics.classify_tokens(Spelling(), [3, 2, 0, 3])
    assert [TOKEN_CLASSES[i] for i in found.tolist()] == ["structure", "structure", "digits", "letters"]
