"""Replays on disk: what was written is read, and what is broken is named with what to run."""

from pathlib import Path

import pytest

from stages.cells import replay_records
from stages.cells.replay_records import ReplayedTree, TreeBucket
from tests.served_cells import replayed_tree

ROW = {
    "checkpoint": "e003", "tree": "t8_2_16", "by": "context", "bucket": "64-96",
    "cycles": 3, "nodes": 45, "expected_accepted": 4.5, "accepted": 6,
}  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_buckets_come_back_as_they_were(here: None) -> None:
    of_nodes = {**ROW, "by": "depth", "bucket": "2", "cycles": None}
    buckets = [TreeBucket(**row) for row in (ROW, of_nodes)]
    TreeBucket.write_csv(TreeBucket.locate("e003"), buckets)
    assert TreeBucket.read("e003") == buckets


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "not found"),
        ("checkpoint,tree,by,bucket,cycles,nodes,expected_accepted\n", r"lacks the columns \['accepted'\]"),
        (
            ",".join(TreeBucket.model_fields) + "\ne003,t8_2_16,context,64-96,many,45,4.5,6\n",
            "has a line that holds a wrong cycles: .*found 'many'",
        ),
    ],
)
def test_what_is_broken_is_named(here: None, text: str | None, message: str) -> None:
    if text is not None:
        TreeBucket.locate("e003").parent.mkdir(parents=True)
        TreeBucket.locate("e003").write_text(text)
    again = "run: dvc repro replay_trees@e003" if text is None else "run: dvc repro -f -s replay_trees@e003"
    with pytest.raises(ValueError, match=rf"results/replay/e003\.inside\.csv {message}.*; {again}$"):
        TreeBucket.read("e003")


def test_greedy_and_sampled_drafts_are_told_apart_on_disk() -> None:
    """Expected counts are no integers; those of greedy drafts stay integers."""
    alike = {"temperature": 0.7, "top_p": 1.0}
    trees = [
        replayed_tree("t3_1_4", 3.0),
        replayed_tree("t3_1_4", 2.0, **alike),
        replayed_tree("t3_1_4", 2.5, draft_sampling="sampled", cycles=12.625, accepted=18.9375, **alike),
    ]
    ReplayedTree.write_csv(ReplayedTree.locate("e003"), trees)
    found = ReplayedTree.read("e003")
    assert found == trees and [type(tree.cycles) for tree in found] == [int, int, float]
    chosen = {
        (temperature, drafts): [tree.tau for tree in replay_records.select_temperature(found, temperature, drafts)]
        for temperature in (0.0, 0.7, 1.0)
        for drafts in ("greedy", "sampled")
    }
    assert chosen == {
        (0.0, "greedy"): [3.0], (0.0, "sampled"): [3.0], (0.7, "greedy"): [2.0], (0.7, "sampled"): [2.5], (1.0, "greedy"): [],
        (1.0, "sampled"): [],
    }  # fmt: skip
