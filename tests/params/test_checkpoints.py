"""Checkpoints that can be trained, imported, replayed and measured, and chains of segments of one draft."""

import pytest

from stages.params import checks
from stages.params.schema import load_params
from tests.params.params_edits import SECOND, edit_params_text, list_problems


def test_a_checkpoint_that_nothing_replays_or_measures_is_pointed_out() -> None:
    """Bug: a list of benchmark_served that has no workload counted as a use."""
    edit_params_text((SECOND, f"{SECOND}\n    e010: {{from: e009, epochs: 1}}"), ("benchmark_served|[e009]", "[e010]"))
    assert [line.partition(":")[0] for line in checks.list_remarks(load_params())] == ["e010"]


@pytest.mark.parametrize(("old", "section"), [("[e003, e009]", "replay_trees"), ("time_trees|[e000]", "time_trees")])
def test_what_servers_do_not_run_is_not_replayed_or_timed(old: str, section: str) -> None:
    heads = "heads: {from: e000, epochs: 2, method: medusa, heads: 4}"
    edit_params_text((SECOND, f"{SECOND}\n    {heads}"), (old, "[heads]"))
    (line,) = list_problems()
    assert line.startswith(
        f"{section}.checkpoints: 'heads' is of medusa, expected checkpoints of EAGLE-3 or block drafts"
    )


@pytest.mark.parametrize(
    ("misspelt", "start"),
    [("method: dflsh", ".method: expected one of"), ("methd: dflash", ": unknown key methd (did you")],
)
def test_a_misspelt_method_of_a_segment_is_one_problem(misspelt: str, start: str) -> None:
    """Bug: each key of the method meant was a problem too, as no key of the method that it was taken for."""
    segment = f"x: {{from: e000, epochs: 1, {misspelt}, layers: 2, block_size: 8, anchors: 64}}"
    edit_params_text((SECOND, f"{SECOND}\n    {segment}"))
    (line,) = list_problems()
    assert line.startswith(f"train_draft.checkpoints.x{start}")
