"""Answer files read as AngelSlim's and EAGLE's do: speeds and lengths by hand from the lines alone."""

import json
from pathlib import Path
from statistics import fmean

import pytest

from stages.published.comparison import MEASURES
from stages.reporting import angelslim_export
from tests.torch_cells import timed_cell


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def average_speed(lines: list[dict]) -> float:
    """As EAGLE's speed.py: new tokens over seconds, here a mean over questions."""
    return fmean(
        sum(sum(c["new_tokens"]) for c in line["choices"]) / sum(sum(c["wall_time"]) for c in line["choices"])
        for line in lines
    )


@pytest.mark.parametrize("analysis", [True, False])
def test_a_cell_gives_a_file_for_each_way_and_an_analysis(tmp_path: Path, analysis: bool) -> None:
    cell = timed_cell("t8_2_16", 1.5)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/old.jsonl").touch()
    angelslim_export.write_answer_files(tmp_path / "out", "qwen", angelslim_export.list_answer_sets([cell]), analysis)
    stem = "qwen-eval-e009-t8_2_16"
    names = {f"{stem}-temperature-{cell.temperature}-{kind}.jsonl" for kind in ("eagle", "baseline")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names | (
        {f"{stem}-analysis.json"} if analysis else set()
    )
    eagle, baseline = (read(tmp_path / "out" / name) for name in sorted(names, reverse=True))
    assert [line["question_id"] for line in eagle] == list(dict.fromkeys(row.id for row in cell.points[0].requests))
    assert {line["model_id"] for line in [*eagle, *baseline]} == {"qwen"} and "idxs" not in baseline[0]["choices"][0]
    if analysis:
        found = json.loads((tmp_path / "out" / f"{stem}-analysis.json").read_text())
        assert found["speedup_ratio"] == pytest.approx(average_speed(eagle) / average_speed(baseline))
        for key, measure in (("acceptance_length", "tau_of_questions"), ("speedup_ratio", "speedup_of_questions")):
            number = MEASURES[measure].find(cell, None)
            assert number is not None and found[key] == pytest.approx(number.value)
        assert {found["eagle_file"], found["baseline_file"]} == names
