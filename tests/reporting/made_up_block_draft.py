"""A block draft beside the EAGLE-3 checkpoints of a made-up project, for the tests of report: replayed, timed, measured."""

import json
from pathlib import Path

from stages.cells.replay_records import GroupTau, ReplayedTree, TreeBucket
from stages.params import schema
from stages.params.tree_shape import TreeShape
from tests.conftest import edit_params

NAME, NUM_DRAFTS = "b006", 5
CHAIN = TreeShape(NUM_DRAFTS, 1, NUM_DRAFTS + 1)
MEASURED = {CHAIN.name: 1.6, "t3_2_8": 2.2}  # tree -> speedup


def add_block_draft(p: schema.Params) -> schema.Params:
    """Add a DSpark checkpoint with replays: its trees are better than EAGLE-3's of as many tokens."""
    segment = {
        "from": "e000", "epochs": 6, "method": "dspark", "layers": 2, "block_size": NUM_DRAFTS, "anchors": 64,
        "markov_rank": 32,
    }  # fmt: skip
    segments = {name: one.model_dump(by_alias=True) for name, one in p.train_draft.checkpoints.items()}
    edit_params(Path(), {"train_draft": {"checkpoints": segments | {NAME: segment}}})
    edit_params(Path(), {"replay_trees": {"checkpoints": [*p.replay_trees.checkpoints, NAME]}})
    trained = json.loads(Path("results/train/e009.json").read_text())
    Path(f"results/train/{NAME}.json").write_text(json.dumps(trained | {"checkpoint": NAME, "from": "e000"}))
    rows = []
    for row in ReplayedTree.read("e009"):
        if row.num_steps <= NUM_DRAFTS:
            better = {"checkpoint": NAME, "tau": row.tau + 2, "tau_low": row.tau + 1.9, "tau_high": row.tau + 2.1}
            rows.append(row.model_copy(update=better))
    if all(row.shape != CHAIN for row in rows):
        rows.append(rows[0].model_copy(update={"tree": CHAIN.name, **vars(CHAIN)}))
    ReplayedTree.write_csv(ReplayedTree.locate(NAME), rows)
    TreeBucket.write_csv(TreeBucket.locate(NAME), [])
    GroupTau.write_csv(GroupTau.locate(NAME), [])
    return schema.load_params()
