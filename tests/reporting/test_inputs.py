"""Missing, foreign and outdated inputs of report are refused with the command to run; unlisted ones are ignored."""

import re
from pathlib import Path

from stages import report
from stages.cells.cell import Cell
from stages.cells.table import ResultRow
from stages.params import schema
from tests.reporting.made_up_results import _lines, write_cell
from tests.served_cells import made_up as served_cell


def test_a_tree_that_a_draft_can_not_grow_is_named_with_the_reason(made_up: schema.Params) -> None:
    """Its cell of the torch engine has the form of loads, and no number."""
    reason = "t8_1_9: num_steps is 8, expected at most 7, the drafts of a block"
    write_cell(served_cell("eval", "e003", "t8_1_9", engine="torch", reason=reason))
    report.main()
    assert [row["status"] for row in _lines(ResultRow.TABLE)].count("unsupported") == 1
    for made in (report.TABLE_FILE, report.PAGE_FILE):
        assert f"unsupported: {reason}" in made.read_text()
    assert not [each for each in report.ANSWERS_FOLDER.iterdir() if "eval-e003-t8_1_9" in each.name]


def test_cells_and_replays_that_params_do_not_list_are_ignored(made_up: schema.Params) -> None:
    stale = Cell.read("torch", "eval", "e009", "t8_2_16")
    stale.model_copy(update={"tree": "t9_2_16", "checkpoint": "e001"}).write()
    Path("results/replay/e001.csv").write_text("not,a,replay\n")
    report.main()
    b = made_up.benchmark
    assert len(_lines(ResultRow.TABLE)) == len(b.workloads) * len(b.checkpoints) * len(b.trees)
    for made in (ResultRow.TABLE, report.REPLAY_TABLE, report.PAGE_FILE):
        assert not re.search(r"\be001\b", made.read_text())
