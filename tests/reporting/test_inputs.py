"""Missing, foreign and outdated inputs of report are refused with the command to run; unlisted ones are ignored."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stages import report
from stages.cells import replay_records, served_records, torch_records
from stages.params import schema
from stages.reporting.benchmark_table import BenchmarkRow
from stages.runtime import atomic
from tests.conftest import EVAL, edit_params
from tests.reporting.made_up_results import _lines
from tests.served_cells import made_up as served_cell
from tests.served_cells import point


def test_a_missing_cell_is_named_with_what_to_run(made_up: schema.Params) -> None:
    torch_records.locate_torch_cell("eval", "e009", "t8_2_16").unlink()
    with pytest.raises(
        ValueError, match=r"eval-e009-t8_2_16\.json not found; run: dvc repro benchmark@eval-e009-t8_2_16"
    ):
        report.main()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda c: c["metrics"].pop("tau_low"), "lacks .'metrics.tau_low'.; .*; run: dvc repro -f -s benchmark@"),
        (
            lambda c: c.update(definitions="docs/metrics.md, version 0"),
            "version 0, expected docs/metrics.md, version 3",
        ),
        (lambda c: c.update(tree="t5_1_6"), "holds the cell eval-e009-t5_1_6"),
    ],
)
def test_a_foreign_cell_is_refused(made_up: schema.Params, spoil: Any, message: str) -> None:
    path = torch_records.locate_torch_cell("eval", "e009", "t8_2_16")
    found = json.loads(path.read_text())
    spoil(found)
    atomic.write_json(path, found)
    with pytest.raises(ValueError, match=message):
        report.main()


def test_a_report_of_another_version_is_refused(made_up: schema.Params) -> None:
    atomic.write_json(Path("results/train/e000.json"), {"draft_vocab_size": 320})
    with pytest.raises(
        ValueError, match=r"train/e000.json lacks .'target_vocab_size'.*dvc repro -f -s init_draft@e000"
    ):
        report.main()


def test_training_from_another_checkpoint_is_refused(made_up: schema.Params) -> None:
    path = Path("results/train/e009.json")
    atomic.write_json(path, json.loads(path.read_text()) | {"from": "e000"})
    with pytest.raises(
        ValueError, match=r"e009\.json starts from e000, expected e003; run: dvc repro train_draft@e009"
    ):
        report.main()


def test_a_replay_without_its_cycles_is_named(made_up: schema.Params) -> None:
    replay_records.locate_tree_statistics("e003").unlink()
    with pytest.raises(ValueError, match=r"e003\.inside\.csv not found; run: dvc repro replay_trees@e003"):
        report.main()


def test_a_torch_cell_of_another_kind_is_named_with_what_to_run(made_up: schema.Params) -> None:
    """One that was written before its workload became a sweep, and the other way round."""
    edit_params(Path(), {"benchmark": {"workloads": {"eval": {**EVAL, "concurrency": [1, 8]}}}})
    with pytest.raises(ValueError, match=r"eval-e003-t8_1_9\.json lacks .*dvc repro -f -s benchmark@eval-e003-t8_1_9"):
        report.main()
    edit_params(Path(), {"benchmark": {"workloads": {"eval": EVAL}}})
    found = served_cell("eval", "e003", "t8_1_9", [point(200, 8, 0.01, 2.0, "t8_1_9")], engine="torch")
    served_records.write_served_cell(found)
    with pytest.raises(ValueError, match=r"eval-e003-t8_1_9\.json lacks .*dvc repro -f -s benchmark@eval-e003-t8_1_9"):
        report.main()


def test_a_tree_that_a_draft_can_not_grow_is_named_with_the_reason(made_up: schema.Params) -> None:
    """Its cell of the torch engine has the form of loads, and no number."""
    reason = "t8_1_9: num_steps is 8, expected at most 7, the drafts of a block"
    served_records.write_served_cell(served_cell("eval", "e003", "t8_1_9", engine="torch", reason=reason))
    report.main()
    b = made_up.benchmark
    assert len(_lines(BenchmarkRow.TABLE)) == len(b.workloads) * len(b.checkpoints) * len(b.trees) - 1
    for made in (report.TABLE_FILE, report.PAGE_FILE):
        assert f"unsupported: {reason}" in made.read_text()
    assert not [each for each in Path(made_up.report.output_dir).iterdir() if "eval-e003-t8_1_9" in each.name]


def test_cells_and_replays_that_params_do_not_list_are_ignored(made_up: schema.Params) -> None:
    stale = torch_records.read_torch_cell("eval", "e009", "t8_2_16").model_dump() | {
        "tree": "t9_2_16",
        "checkpoint": "e001",
    }
    torch_records.write_torch_cell(stale)
    Path("results/replay/e001.csv").write_text("not,a,replay\n")
    report.main()
    b = made_up.benchmark
    assert len(_lines(BenchmarkRow.TABLE)) == len(b.workloads) * len(b.checkpoints) * len(b.trees)
    for made in (BenchmarkRow.TABLE, report.REPLAY_TABLE, report.PAGE_FILE):
        assert not re.search(r"\be001\b", made.read_text())
