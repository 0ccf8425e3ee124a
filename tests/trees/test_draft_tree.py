"""Trees against a slow, obvious enumeration: paths in a dictionary, Python's own sort, no tensors inside."""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.engine.memory_estimate import estimate_memory
from stages.params.tree_shape import TreeShape
from stages.replay.replay import ReplayBatch, replay_answers
from stages.trees import accept_length, draft_tree
from tests.built_engines import build_engine
from tests.draft.slow_draft import CONFIG, random_draft, small_target

VOCAB = 5


def successors(path: tuple[int, ...], kind: str, seed: int, tree_scoring: str = "sglang") -> list[float]:
    """A made-up draft: what each token after `path` adds to a score, in float32, as a function of nothing else: its
    probability, or its logarithm.
    """
    as_asked = torch.log_softmax if tree_scoring == "eagle" else torch.softmax
    if kind == "ties":  # many equal probabilities
        return as_asked(torch.tensor([1.0, 1.0, 1.0, 1.0, -torch.inf]), 0).tolist()
    generator = torch.Generator().manual_seed(hash((path, seed)) & 0x7FFFFFFF)
    logits = torch.randn(VOCAB, generator=generator) * (200 if kind == "saturated" else 2)  # 200: exact zeros and ones
    return as_asked(logits, 0).tolist()


def enumerate_candidates(
    kind: str, seed: int, steps: int, topk: int, tree_scoring: str
) -> list[tuple[float, tuple[int, ...], int]]:
    """All candidates in SGLang's order as (score, path, parent's number), as its `select_top_k_tokens` does; or
    with logarithms that are added, as EAGLE's `topK_genrate` does.
    """

    def best(items: list[float], k: int) -> list[int]:
        return sorted(range(len(items)), key=lambda i: (-items[i], i))[:k]

    def joined(a: float, b: float) -> float:  # in float32, as the engine does
        one, other = torch.tensor(a), torch.tensor(b)
        return (one + other if tree_scoring == "eagle" else one * other).item()

    found: list[tuple[float, tuple[int, ...], int]] = []
    beam = [(1.0, (), -1)]  # score, path, candidate number
    for step in range(steps):
        level = []
        for score, path, number in beam:
            probabilities = successors(path, kind, seed, tree_scoring)
            for token in best(probabilities, topk):
                probability = probabilities[token] if step == 0 else joined(score, probabilities[token])
                level.append((probability, (*path, token), number))
        first = len(found)
        found += level
        beam = [(level[i][0], level[i][1], first + i) for i in best([c[0] for c in level], topk)]
    return found


def tensors(kind: str, seed: int, steps: int, topk: int, tree_scoring: str) -> draft_tree.Candidates:
    """The same expansion through stages.trees.draft_tree, one tree."""
    beam, ids = draft_tree.select_topk(torch.tensor([successors((), kind, seed, tree_scoring)]), topk)
    paths = [(t,) for t in ids[0].tolist()]
    numbers = list(range(topk))
    scores, tokens, parents = [beam], [ids], [torch.full_like(ids, -1)]
    for step in range(1, steps):
        probabilities = torch.tensor([[successors(p, kind, seed, tree_scoring) for p in paths]])
        probabilities, new_ids = draft_tree.select_topk(probabilities, topk)
        new_scores, beam, indices = draft_tree.extend_beam(
            beam, probabilities, draft_tree.TREE_SCORINGS[tree_scoring].combine_scores
        )
        new_ids = new_ids.flatten(1)
        scores.append(new_scores)
        tokens.append(new_ids)
        parents.append(torch.tensor([numbers]).repeat_interleave(topk, dim=1))
        slots = (indices // topk)[0].tolist()
        paths = [(*paths[s], new_ids[0, p].item()) for s, p in zip(slots, indices[0].tolist(), strict=True)]
        numbers = [p + topk + (step - 1) * topk * topk for p in indices[0].tolist()]
    return draft_tree.Candidates(torch.cat(scores, 1), torch.cat(tokens, 1), torch.cat(parents, 1))


@st.composite
def shapes(draw) -> tuple[str, int, int, int, str, int]:
    steps, topk = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    most = topk + (steps - 1) * topk * topk
    tokens = draw(st.integers(2, most + 1))
    kind, tree_scoring = (
        draw(st.sampled_from(["plain", "ties", "saturated"])),
        draw(st.sampled_from(list(draft_tree.TREE_SCORINGS))),
    )
    return kind, draw(st.integers(0, 10_000)), steps, topk, tree_scoring, tokens


@settings(max_examples=150, deadline=None)
@given(shapes())
def test_candidates_are_those_of_the_enumeration(shape) -> None:
    *drawn, _ = shape
    _, _, steps, topk, _ = drawn
    slow, fast = enumerate_candidates(*drawn), tensors(*drawn)
    assert fast.scores[0].tolist() == [c[0] for c in slow]
    assert fast.tokens[0].tolist() == [c[1][-1] for c in slow]
    assert fast.parents[0].tolist() == [c[2] for c in slow]
    assert len(slow) == topk + (steps - 1) * topk**2


@settings(max_examples=150, deadline=None)
@given(shapes())
def test_the_tree_is_closed_and_is_the_best_of_the_enumeration(shape) -> None:
    *drawn, tokens = shape
    slow, kept = enumerate_candidates(*drawn), draft_tree.build_tree(tensors(*drawn), tokens)
    expected = sorted(sorted(range(len(slow)), key=lambda i: (-slow[i][0], i))[: tokens - 1])
    assert kept.candidate_numbers[0].tolist() == expected
    node_of = {-1: 0} | {number: i + 1 for i, number in enumerate(expected)}
    # A parent that is not kept would be a KeyError here: SGLang's own torch.topk makes such orphans on saturated scores.
    assert kept.parents[0].tolist() == [0, *(node_of[slow[n][2]] for n in expected)]
    assert kept.depths[0].tolist() == [0, *(len(slow[n][1]) for n in expected)]
    assert kept.tokens[0].tolist() == [slow[n][1][-1] for n in expected]


@settings(max_examples=100, deadline=None)
@given(shapes(), st.integers(0, 1000))
def test_the_target_accepts_its_own_path_as_far_as_it_is_in_the_tree(shape, choice_seed: int) -> None:
    *drawn, tokens = shape
    slow, kept = enumerate_candidates(*drawn), draft_tree.build_tree(tensors(*drawn), tokens)
    paths = [(), *(slow[n][1] for n in kept.candidate_numbers[0].tolist())]

    def chosen(path: tuple[int, ...]) -> int:  # a made-up target, greedy in its own probabilities
        return max(range(VOCAB), key=lambda t: successors(path, "plain", choice_seed)[t])

    walked: tuple[int, ...] = ()
    while (*walked, chosen(walked)) in paths:
        walked = (*walked, chosen(walked))
    steps = drawn[2]
    path, count = draft_tree.find_accepted_path(kept, torch.tensor([[chosen(p) for p in paths]]), steps)
    assert path.shape == (1, steps + 1) and count.item() == len(walked) + 1
    assert [paths[n] for n in path[0, : len(walked) + 1]] == [walked[:i] for i in range(len(walked) + 1)]
    assert not path[0, len(walked) + 1 :].any()


@pytest.mark.parametrize(("rows", "count", "k"), [(40, 997, 1), (40, 997, 47), (200, 129, 100), (3, 32_001, 4)])
def test_the_best_of_many_scores_are_those_of_a_sort(rows: int, count: int, k: int) -> None:
    scores = torch.randn(rows, count, generator=torch.Generator().manual_seed(0)).mul(4).bfloat16().float()
    scores[0] = -torch.inf
    sorted_rows = [sorted(range(count), key=lambda i, row=row: (-row[i], i))[:k] for row in scores.tolist()]
    assert draft_tree.select_topk(scores, k)[1].tolist() == sorted_rows


def test_products_stay_ordered_when_they_underflow() -> None:
    """Products of tiny probabilities reach denormals and zero; their bits still order as their values do."""
    scores = torch.tensor([[math.ldexp(1, -149), 0.0, math.ldexp(1, -126), 1.0, 0.0]])
    assert draft_tree.select_topk(scores, 5)[1].tolist() == [[3, 2, 0, 1, 4]]


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ((2, 2, 8), "t2_2_8 has 7 nodes under the root, expected at most the 6 candidates"),
        ((4, 1, 6), "t4_1_6 has 5 nodes under the root, expected at most the 4 candidates"),
        ((0, 2, 2), "t0_2_2: expected num_steps and topk of 1 or more"),
        ((2, 12, 4), "t2_12_4: topk is 12, expected at most 11, the tokens of the draft's vocabulary; lower topk"),
    ],
)  # fmt: skip
def test_a_tree_that_can_not_be_built_is_refused_before_anything_is_computed(shape: tuple, says: str) -> None:
    """By the engine and by replay alike, with the numbers."""
    steps, topk, tokens = shape
    draft, embedding, _ = random_draft(3)
    with pytest.raises(ValueError, match=re.escape(says)):
        draft_tree.check_tree(TreeShape(*shape), CONFIG.draft_vocab_size)
    ids, features = torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, 8, 3 * CONFIG.hidden_size)
    answers = ReplayBatch(ids, features, torch.tensor([3]), torch.tensor([8]))
    with pytest.raises(ValueError, match=re.escape(says)):
        replay_answers(draft, embedding, answers, [TreeShape(*shape)])
    engine = build_engine(small_target(CONFIG.vocab_size, 1), [], [1, 2, 3], draft)
    with pytest.raises(ValueError, match=re.escape(says)):
        next(engine.decode_speculative([1, 2], 5, TreeShape(steps, topk, tokens)))


def test_a_tree_deeper_than_the_drafts_window_is_refused() -> None:
    """Bug: of an imported draft with a sliding window, whose steps params.yaml can't know, replay and engine ended by an
    AssertionError.
    """
    draft, embedding, _ = random_draft(3, sliding_window=4)
    says = (
        r"t5_1_6: num_steps is 5, expected at most 4, the draft's sliding_window: .* lower num_steps, or take another"
    )
    ids, features = torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, 8, 3 * CONFIG.hidden_size)
    rows = draft, embedding, ReplayBatch(ids, features, torch.tensor([3]), torch.tensor([8]))
    engine = build_engine(small_target(CONFIG.vocab_size, 1), [], [1, 2, 3], draft)
    for refused in (
        lambda: replay_answers(*rows, [TreeShape(4, 1, 5), TreeShape(5, 1, 6)]),
        lambda: next(engine.decode_speculative([1, 2], 5, TreeShape(5, 1, 6))),
        lambda: estimate_memory(engine, 9, 2, TreeShape(5, 1, 6)),
    ):
        with pytest.raises(ValueError, match=says):
            refused()
    replay_answers(*rows, [TreeShape(4, 1, 5)])
    assert len(list(engine.decode_speculative([1, 2], 5, TreeShape(4, 1, 5)))) > 1


def test_tau_pools_cycles_not_prompts() -> None:
    """docs/metrics.md; two prompts: 9 drafts in 3 cycles, 0 in 9. Pooled (9 + 12) / 12, not the mean of 4 and 1."""
    assert accept_length.compute_tau(np.array([9, 0]), np.array([3, 9])) == 21 / 12
