"""What a stage's line says it made: read from the reports that stages write, and nothing where there is none."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from pipeline import stage_summaries
from pipeline.stage_summaries import summarise_stage
from tests.conftest import ROOT

FIX_REPORT: dict[str, Any] = {
    "rows_out": 1182, "repaired": 40, "dropped": 18, "train": 1000, "eval": 182,
    "dropped_reasons": {"duplicate": 6, "not_toon": 12, "too_long": 0},
}  # fmt: skip


def write(path: str, value: Any) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(value))


def test_drops_are_told_with_their_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write("results/fix_report.json", FIX_REPORT)
    kept = "1,182 conversations kept (40 repaired; 1,000 train, 182 eval)"
    assert summarise_stage("fix_data") == f"{kept}, 18 dropped: 12 tables unreadable, 6 duplicates"
    write("results/fix_report.json", FIX_REPORT | {"dropped_reasons": {f"reason_{n}": n for n in range(1, 8)}})
    assert summarise_stage("fix_data") == (
        f"{kept}, 28 dropped: 7 reason 7, 6 reason 6, 5 reason 5, 4 reason 4, 6 for other reasons (results/fix_report.json)"
    )
    write("results/fix_report.json", FIX_REPORT | {"dropped_reasons": {}})
    assert summarise_stage("fix_data") == kept


def test_an_imported_draft_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the line had the seconds alone."""
    monkeypatch.chdir(tmp_path)
    report = {
        "method": "eagle3", "draft_parameters": 270848, "draft_vocab_size": 320, "rope_theta": 1e6, "notes": [], "options": {},
    }  # fmt: skip
    write("results/train/hub.json", report)
    line = "eagle3, 270,848 parameters, draft vocabulary 320, rope_theta 1,000,000"
    assert summarise_stage("import_draft@hub") == line
    write("results/train/hub.json", report | {"notes": ["few positions", "no t2d"]})
    assert summarise_stage("import_draft@hub") == f"{line}; note: few positions; note: no t2d"


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"rows_out": "many"}'])
def test_a_report_that_is_missing_or_of_another_form_gives_no_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    stages = [*stage_summaries.SUMMARIES, "train_draft@e001", "benchmark@eval-e003-t5_1_6", "no_such_stage"]
    assert {summarise_stage(stage) for stage in stages} == {""}
    for path in ("fix_report", "train/e001", "cells/eval-e003-t5_1_6", "metrics"):
        Path(f"results/{path}.json").parent.mkdir(parents=True, exist_ok=True)
        Path(f"results/{path}.json").write_text(text)
    assert {summarise_stage(stage) for stage in stages} == {""}


def test_every_stage_of_a_run_says_what_it_made(small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the real reports: a field that a stage renames would empty its line."""
    monkeypatch.chdir(small_run)
    lock = YAML(typ="safe").load(Path("dvc.lock"))
    silent = {name.partition("@")[0] for name in lock["stages"] if not summarise_stage(name)}
    assert silent <= {"prepare_prompts"}  # a table alone, without a report
    cell = json.loads(Path("results/cells/eval-e003-t8_2_16.json").read_text())["metrics"]
    assert summarise_stage("benchmark@eval-e003-t8_2_16").startswith(
        f"tau {cell['tau']:.2f}, speedup {cell['speedup']:.2f}x"
    )


def test_every_stage_with_a_report_has_a_summary() -> None:
    stages = set(YAML(typ="safe").load(ROOT / "dvc.yaml")["stages"])
    assert stages - set(stage_summaries.SUMMARIES) == {"prepare_prompts"}


def test_a_served_cell_says_its_loads_and_taus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    points = [{"acceptance": {"tau": tau}} for tau in (2.5, 2.25)]
    write("results/cells/served-chat-e009-t8_2_16.json", {"status": "measured", "points": points})
    write("results/cells/served-chat-baseline.json", {"status": "measured", "points": [{"acceptance": None}]})
    write("results/cells/served-chat-e009-t8_1_9.json", {"status": "refused", "points": []})
    assert summarise_stage("benchmark_served@chat-e009-t8_2_16") == "2 loads, tau 2.25 to 2.50"
    assert summarise_stage("benchmark_served_baseline@chat") == "1 load"
    assert summarise_stage("benchmark_served@chat-e009-t8_1_9") == "refused"
    shutil.copy("results/cells/served-chat-e009-t8_2_16.json", "results/cells/loads-e009-t8_2_16.json")
    assert summarise_stage("benchmark@loads-e009-t8_2_16") == "2 loads, tau 2.25 to 2.50"
