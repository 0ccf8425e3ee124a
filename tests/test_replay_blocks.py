"""The replay stage on block drafts: integers of every width and of trees against a slow walk by the slow draft's own blocks.

The target and its answers are those of test_replay_trees: nine tokens, so that random drafts are often right.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import TopPLogitsWarper

from stages import replay_trees
from stages.cells import replay_records
from stages.cells.replay_records import ReplayedTree
from stages.draft import checkpoint
from stages.families.block.config import build_block_config
from stages.families.block.files import Files
from stages.families.block.model import BlockDraft
from stages.hidden_states import reader
from stages.params.families import BLOCKS
from stages.params.tree_shape import TreeShape
from stages.target import manifest
from tests.conftest import edit_params
from tests.draft.slow_block_draft import (
    METHOD_OPTIONS,
    SEGMENT_KEYS,
    block_states,
    logits_after,
    random_block_draft,
    read_context,
)
from tests.replay.test_block_replay import slow_tree
from tests.test_replay_trees import V, project, shared_project  # noqa: F401 - fixtures

pytestmark = pytest.mark.usefixtures("one_thread")
every_method = pytest.mark.parametrize("method", ["dflash", "dflash2", "dspark"])

NAME, PLACES, STORED = "b003", [0, 2], [1, 2, 3]  # the draft reads two of the three stored layers
SLOTS = 5
GRID = {"num_steps": [1, 2, 3, 4, 9], "topk": [1, 2, 3], "num_draft_tokens": [4, 6, 9]}


def write_block(method: str, seed: int = 36, **options: Any) -> BlockDraft:
    """Write a random block draft as the checkpoint `b003` and list it. That of seed 36 is right more often than most."""
    layers = tuple(STORED[i] for i in PLACES)
    sizes = {"vocab_size": V, "mask_token_id": 7, "block_size": SLOTS, "feature_layers": layers, **options}
    draft = random_block_draft(seed, 0.5, torch.float32, **METHOD_OPTIONS[method], **sizes)[0]
    config = build_block_config(draft.config, 8)
    Files(BLOCKS["dflash"]).write(checkpoint.locate_checkpoint(NAME), config, dict(draft.state_dict()))
    segment = {"from": "e000", "epochs": 1, "method": method, "layers": 2, "block_size": SLOTS, "anchors": 8}
    segment |= SEGMENT_KEYS[method]
    edit_params(Path(), {"train_draft": {"checkpoints": {"e003": {"from": "e000", "epochs": 3}, NAME: segment}}})
    edit_params(Path(), {"replay_trees": {"checkpoints": ["e003", NAME], **GRID, "trace_trees": []}})
    return draft


class SlowReplay:
    """The blocks at every position of a split's answers, drafted one anchor at a time."""

    def __init__(self, draft: BlockDraft, split: str):
        self.draft = draft
        self.embedding, self.head = manifest.read_embedding_and_head(manifest.read_manifest())
        self.answers = list(reader.read_rows(Path("data/hiddens") / split, torch.float32, PLACES))
        self.following, self.states, anchor_tokens, self.first = [], [], [], []
        self.chains: dict[int, list[int]] = {}
        for row in self.answers:
            self.first.append(len(self.states))
            ids, context = row.ids.tolist(), read_context(draft, row.features)
            for a in range(row.prompt_length, len(ids) - 1):
                states = block_states(draft, self.embedding, ids, row.features, a, context)
                self.states.append(torch.stack(states if draft.config.method == "dspark" else states[1:]))
                self.following.append(tuple(ids[a + 1 :]))
                anchor_tokens.append(ids[a])
        self.case: Any = SimpleNamespace(
            draft=draft, head=self.head, states=torch.stack(self.states), anchor_tokens=anchor_tokens
        )

    def draft_chain(self, position: int, width: int) -> list[int]:
        """The first `width` drafts of the block, each after the one before."""
        if position not in self.chains:
            tokens = [self.case.anchor_tokens[position]]
            for state in self.states[position]:
                tokens.append(int(logits_after(self.draft, self.head, state, tokens[-1]).argmax()))
            self.chains[position] = tokens[1:]
        return self.chains[position][:width]

    def count_accepted(self, tree: TreeShape, position: int) -> int:
        following = self.following[position]
        if tree.topk == 1:
            paths = {tuple(self.draft_chain(position, d)) for d in range(1, tree.num_steps + 1)}
        else:
            enumerated = tree.num_steps, tree.topk, tree.num_draft_tokens - 1
            paths = set(slow_tree(self.case, position, *enumerated, beam=tree.topk))
        deepest = 0
        while deepest < len(following) and following[: deepest + 1] in paths:
            deepest += 1
        return deepest

    def walk(self, tree: TreeShape) -> list[int]:
        """The drafts that each cycle of every answer accepts."""
        cycles = []
        for first, row in zip(self.first, self.answers, strict=True):
            position, count = 0, len(row.ids) - 1 - row.prompt_length
            while position < count:
                cycles.append(self.count_accepted(tree, first + position))
                position += cycles[-1] + 1
        return cycles

    def list_probabilities(
        self, position: int, last_states: torch.Tensor, width: int, sampling: tuple[float, float]
    ) -> list[float]:
        """beta of each draft, given that those before it were accepted; last [T, H] from the anchor on."""
        found, previous = [], self.case.anchor_tokens[position]
        for d, token in enumerate(self.following[position][:width]):
            logits = logits_after(self.draft, self.head, self.states[position][d], previous)
            q, p = (
                torch.softmax(logits / sampling[0], 0)[token],
                warped(self.head @ last_states[d][None].T, sampling)[token],
            )
            found.append(min(1.0, float(q / p)))
            previous = token
        return found

    def expect(self, width: int, sampling: tuple[float, float]) -> tuple[float, float]:
        """Return expected cycles and accepted sampled drafts of all answers, position by position, in plain arithmetic."""
        cycles = accepted = 0.0
        for first, row in zip(self.first, self.answers, strict=True):
            count = len(row.ids) - 1 - row.prompt_length
            starts = [1.0, *[0.0] * (count + width)]
            for position in range(count):
                probabilities = self.list_probabilities(
                    first + position, row.last[row.prompt_length + position :], width, sampling
                )
                reached = starts[position]
                cycles += reached
                for j, probability in enumerate([*probabilities, 0.0]):
                    starts[position + j + 1] += reached * (1 - probability)
                    reached *= probability
                    accepted += reached
        return cycles, accepted


SLOW: dict[tuple[str, str], SlowReplay] = {}


def replay_slowly(draft: BlockDraft, split: str) -> SlowReplay:
    """The slow replay of the draft that `write_block` writes: made once, since it takes longer than all else here."""
    key = draft.config.method, split
    SLOW[key] = SLOW[key] if key in SLOW else SlowReplay(draft, split)
    return SLOW[key]


def read_rows(temperature: float, draft_sampling: Any = "greedy") -> dict[TreeShape, ReplayedTree]:
    rows = replay_records.select_temperature(ReplayedTree.read(NAME), temperature, draft_sampling)
    return {row.shape: row for row in rows}


def count_in(memory_gib: float) -> list[float]:
    """Return the counts of all rows, by replay in chunks that fit into so much memory."""
    edit_params(Path(), {"replay_trees": {"memory_gib": memory_gib}})
    replay_trees.main(NAME)
    rows = ReplayedTree.read(NAME)
    return [
        count for row in rows for count in (row.num_steps, row.topk, row.num_draft_tokens, row.accepted, row.cycles)
    ]


@every_method
def test_every_width_and_tree_equals_a_slow_walk_of_every_answer(project: Path, method: str) -> None:  # noqa: F811
    """With memory for all answers at once; what is cut into parts for less memory is the same of all methods."""
    draft, counts = write_block(method), count_in(1)
    if method == "dspark":
        assert count_in(1e-6) == pytest.approx(counts, rel=1e-6)  # those of sampled drafts are sums of floats
    num_drafts = 5 if method == "dspark" else 4
    chains = [TreeShape(m, 1, m + 1) for m in range(1, num_drafts + 1)]
    trees = [TreeShape(3, 2, 4), TreeShape(4, 2, 9), TreeShape(2, 3, 6), TreeShape(4, 3, 9)]
    for temperature, split in ((0.0, "eval"), (0.7, "eval_t")):
        rows, slow = read_rows(temperature), replay_slowly(draft, split)
        assert {shape.num_steps for shape in rows} == set(range(1, num_drafts + 1)), "none is deeper than the block"
        assert {shape.topk for shape in rows} == {1, 2, 3}
        for tree in [*chains, *trees]:
            walked, row = slow.walk(tree), rows[tree]
            assert (row.accepted, row.cycles) == (sum(walked), len(walked)), tree.name
            shares = [sum(j > d for j in walked) / max(1, sum(j >= d for j in walked)) for d in range(tree.num_steps)]
            assert row.acceptance == " ".join(f"{share:.4f}" for share in shares[: max(walked) + 1])
            assert row.tau == pytest.approx(1 + sum(walked) / len(walked))
            assert row.tau_low is not None and row.tau_low <= row.tau <= row.tau_high
            assert row.tau_oracle is not None and row.tau_oracle >= row.tau and row.tau_adaptive is not None
            if tree.topk == 1:
                assert row.mean_depth == tree.num_steps
        assert rows[chains[-1]].accepted > (15 if method == "dflash2" else 20), (
            "the drafts are never right: the comparison says nothing"
        )
        assert rows[trees[1]].tau > rows[TreeShape(4, 1, 5)].tau


def test_the_chain_that_engines_serve_is_replayed_though_the_grid_lacks_it(project: Path) -> None:  # noqa: F811
    write_block("dspark")
    full = TreeShape(5, 1, 6)
    edit_params(Path(), {"replay_trees": {"num_steps": [2, 9], "topk": [2], "num_draft_tokens": [4, 6]}})
    replay_trees.main(NAME)
    assert list(read_rows(0.0)) == [full, TreeShape(2, 2, 4), TreeShape(2, 2, 6)]
    edit_params(Path(), {"replay_trees": {"num_steps": [9]}})
    replay_trees.main(NAME)
    assert list(read_rows(0.0)) == [full]


def warped(logits: torch.Tensor, sampling: tuple[float, float]) -> torch.Tensor:
    """Probabilities [V] after temperature and top-p, by transformers; logits [V, 1]."""
    scores = logits.T / sampling[0]
    return TopPLogitsWarper(sampling[1])(None, scores).softmax(-1)[0] if sampling[1] < 1 else scores.softmax(-1)[0]


@every_method
def test_sampled_drafts_are_replayed_by_expectation(project: Path, method: str) -> None:  # noqa: F811
    """Every chain of the grid, on the answers above temperature 0 alone, beside the rows of greedy drafts."""
    draft = write_block(method)
    replay_trees.main(NAME)
    num_drafts = 5 if method == "dspark" else 4
    rows, slow = read_rows(0.7, "sampled"), replay_slowly(draft, "eval_t")
    assert list(rows) == [TreeShape(m, 1, m + 1) for m in range(1, num_drafts + 1)]
    for width in (1, num_drafts):
        row = rows[TreeShape(width, 1, width + 1)]
        cycles, accepted = slow.expect(width, (0.7, 0.9))
        assert (row.cycles, row.accepted) == (pytest.approx(cycles, rel=1e-5), pytest.approx(accepted, rel=1e-5))
        assert row.tau == pytest.approx(1 + accepted / cycles, rel=1e-5) and row.tau_low < row.tau < row.tau_high
        assert row.acceptance is not None and len(row.acceptance.split()) == width and row.mean_depth == width
        assert row.tau_oracle is None and row.tau_adaptive is None
    assert rows[TreeShape(1, 1, 2)].tau > 1.1 and rows[TreeShape(1, 1, 2)].tau != read_rows(0.7)[TreeShape(1, 1, 2)].tau
    assert read_rows(0.0, "sampled") == read_rows(0.0), "at temperature 0 nothing is sampled"
    assert {row.draft_sampling for row in read_rows(0.0).values()} == {"greedy"}


# What is refused


def refused() -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - each caller looks at the message
        replay_trees.main(NAME)
    assert not ReplayedTree.locate(NAME).exists()
    return str(error.value)
