"""import_draft on published block drafts: each family by the stage, and what later stages make of the checkpoints.

The target and its answers are those of test_replay_trees: nine tokens, so that random drafts are often right.
"""

import csv
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stages import benchmark, benchmark_served, import_draft, replay_trees, time_cycles
from stages.cells import timing_grid, training_records
from stages.cells.cell import UNSUPPORTED, Cell
from stages.cells.replay_records import ReplayedTree
from stages.cells.table import find_replayed_tau
from stages.draft import checkpoint
from stages.engines import registry
from stages.engines.protocol import describe_draft
from stages.families.block.model import BlockDraft
from stages.measuring import server_setup
from stages.params import schema
from stages.params.families import BLOCKS
from stages.params.tree_shape import TreeShape
from tests.conftest import edit_params
from tests.draft import published_blocks
from tests.draft.published_blocks import Form, publish
from tests.test_replay_blocks import GRID, SLOTS, write_block
from tests.test_replay_trees import END, V, project, shared_project  # noqa: F401 - fixtures
from tests.torch_cells import read_line

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_LAYERS, MASK = 4, 7
FORMS: list[tuple[str, Form]] = [
    ("dflash", published_blocks.z_lab),
    ("dflash2", published_blocks.speculators),
    ("dspark", published_blocks.deepspec),
]
every_form = pytest.mark.parametrize(("method", "form"), FORMS, ids=lambda x: x if isinstance(x, str) else x.__name__)


def import_published(method: str, form: Form, name: str = "theirs") -> BlockDraft:
    """Publish the checkpoint `b003` of `write_block`, import it as `name`, and list both."""
    draft = write_block(method, max_position_embeddings=256)
    publish(Path("from_others") / name, *form(draft, NUM_LAYERS))
    item = {"model": f"from_others/{name}", "revision": None, "rope_theta": None}
    edit_params(Path(), {"import_draft": {"checkpoints": {name: item}}})
    edit_params(Path(), {"replay_trees": {"checkpoints": ["b003", name], **GRID, "trace_trees": []}})
    import_draft.main(name)
    return draft


def read_replay(name: str) -> list[list[str]]:
    """The rows of a checkpoint's replay without its name."""
    with ReplayedTree.locate(name).open() as file:
        return [row[1:] for row in csv.reader(file)]


@every_form
def test_an_imported_draft_is_replayed_like_the_checkpoint_it_was(
    project: Path,  # noqa: F811
    method: str,
    form: Form,
    capsys: pytest.CaptureFixture[str],
) -> None:
    draft = import_published(method, form)
    printed = capsys.readouterr().out
    ours, theirs = (checkpoint.locate_checkpoint(name) / "draft" for name in ("b003", "theirs"))
    weights, expected = (load_file(folder / "model.safetensors") for folder in (theirs, ours))
    assert set(weights) == set(expected) and all(torch.equal(weights[n], expected[n]) for n in expected)
    config, meant = (json.loads((folder / "config.json").read_text()) for folder in (theirs, ours))
    assert config == meant | {"num_target_layers": NUM_LAYERS}
    for name in ("b003", "theirs"):
        replay_trees.main(name)
    rows = read_replay("theirs")
    assert rows == read_replay("b003") and len(rows) > 10
    record = training_records.read_import("theirs")
    assert (record.method, record.num_drafts) == (method, draft.config.num_drafts)
    assert "note:" not in printed and f"theirs: {method}, from_others/theirs" in printed
    found = json.loads(Path("results/train/theirs.json").read_text())
    assert found["draft_parameters"] == sum(x.numel() for x in draft.parameters())
    assert (found["options"], found["draft_vocab_size"]) == ({"method": method, "block_size": SLOTS}, V)


def test_an_imported_draft_is_decoded_and_timed(project: Path) -> None:  # noqa: F811
    """A cell accepts what replay says, and the grid leaves out trees deeper than the block."""
    draft = import_published("dspark", published_blocks.specforge_dspark)
    trees = ["t3_1_4", "t3_2_6"]
    edit_params(Path(), {"benchmark": {"checkpoints": ["theirs"], "trees": trees, "torch_workloads": ["eval"]}})
    grid = {"num_steps": [1, 2, 3, 4, 9], "topk": [1, 2, 3], "num_draft_tokens": [4, 6, 9], "context": 16}
    edit_params(Path(), {"time_cycles": grid | {"checkpoints": ["theirs"]}})
    replay_trees.main("theirs")
    for tree in trees:
        benchmark.main("eval", "theirs", tree)
        line = read_line("eval", "theirs", tree)
        assert find_replayed_tau(ReplayedTree.read("theirs"), line.cell) == line.row.tau
    time_cycles.main("torch", "theirs")
    timed = timing_grid.read_grids("torch", "theirs", "tiny")[0].grid
    assert max(row["num_steps"] for row in timed) == draft.config.num_drafts


def test_an_imported_draft_is_served_as_the_chain_of_its_block(project: Path) -> None:  # noqa: F811
    """Bug: benchmark_served read every draft as EAGLE-3's, and ended with "is no EAGLE-3 draft" for a block draft."""
    draft = import_published("dflash", published_blocks.speculators)
    config = server_setup.read_draft_config(schema.load_params(), "theirs")
    depth = draft.config.num_drafts
    served = describe_draft("", config, TreeShape(depth, 1, depth + 1), "EAGLE3")
    assert config["block_size"] == SLOTS and served.algorithm == "DFLASH"
    assert registry.get("sglang").explain_unsupported(TreeShape(depth, 1, depth + 1), config) is None
    wider = registry.get("sglang").explain_unsupported(TreeShape(depth + 1, 1, depth + 2), config)
    assert wider is not None and f"t{depth}_1_{depth + 1}" in wider
    served = {"checkpoints": ["theirs"], "trees": ["t3_2_6"], "workloads": ["eval"]}
    edit_params(Path(), {"benchmark_served": served})
    benchmark_served.main("sglang", "eval", "theirs", "t3_2_6")  # without a server
    cell = Cell.read("sglang", "eval", "theirs", "t3_2_6")
    assert cell.status == UNSUPPORTED and f"chains only of {BLOCKS['dflash'].title} drafts" in str(cell.reason)
    file = checkpoint.locate_checkpoint("theirs") / "draft/model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"model\.safetensors is not valid safetensors"):
        server_setup.read_draft_config(schema.load_params(), "theirs")


# What is refused by the stage
