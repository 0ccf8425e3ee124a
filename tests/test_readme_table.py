"""The README's table and picture say what benchmark.csv says."""

import re
import sys
from pathlib import Path

import pytest

from benchmarks import readme_picture, readme_served, readme_table
from stages.cells.table import SPECULATIVE, ResultRow
from stages.runtime import atomic


def make_row(tree: str, checkpoint: str = "e009", **other: object) -> ResultRow:
    """A measured line whose interval of the speedup lies above 1."""
    steps, topk, tokens = map(int, tree[1:].split("_"))
    values = {
        "workload": "eval", "checkpoint": checkpoint, "tree": tree, "num_steps": steps, "topk": topk, "num_draft_tokens": tokens,
        "source": "measured", "tau": 3.5, "tau_low": 3.25, "tau_high": 3.75, "accept_rate": 0.3125, "ttft_mean_s": 0.0081,
        "e2e_mean_s": 0.25, "output_throughput": 300.0, "in_turns": True, "temperature": 0.0,
        "speedup": 1.5, "speedup_low": 1.25, "speedup_high": 1.8,
        "identical_share": 1.0, "replay_tau": 3.6, "engine": "torch",
    }  # fmt: skip
    return ResultRow.model_validate(values | other)


NOT_TIMED = dict.fromkeys(("ttft_mean_s", "e2e_mean_s", "output_throughput", "identical_share"))
REPLAYED = {"source": "replayed", "tau": 2.0, "tau_low": 1.9, "tau_high": 2.1, **NOT_TIMED}
ROWS = [
    make_row("t8_2_16"),
    make_row("t5_1_6", speedup=1.05, speedup_low=0.9, speedup_high=1.2, identical_share=0.98),
    make_row("t5_2_8", tau_low=None, tau_high=None, speedup_low=None, speedup_high=None),
    make_row("t8_2_16", "e003", **REPLAYED, speedup=0.8, speedup_low=0.7, speedup_high=0.9),
    make_row("t10_3_32", "e003", **REPLAYED, speedup=None, speedup_low=None, speedup_high=None),
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run, and a README with an old table."""
    monkeypatch.chdir(tmp_path)
    readme_table.RECORDS.mkdir(parents=True)
    ResultRow.write_table(ROWS)
    cell = Path("results/cells/eval-e009-t8_2_16.json")
    atomic.write_json(cell, {"hardware": {"cpu": "Made-up CPU, 2 cores", "threads": 2}})
    Path("README.md").write_text("before\n<!-- table docs/old.csv -->\nold\n<!-- /table -->\nafter\n", encoding="utf-8")
    return tmp_path


def write(monkeypatch: pytest.MonkeyPatch, *more: str) -> str:
    monkeypatch.setattr(sys, "argv", ["readme_table", "2026-11-22", "3 min", *more])
    readme_table.main()
    return Path("README.md").read_text(encoding="utf-8")


def test_the_table_has_intervals_and_marks_what_was_replayed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = write(monkeypatch)
    block = readme_table.BLOCK.search(text)
    assert block and block[1] == "docs/results/2026-11-22-weather-tiny.csv"
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "docs/old.csv" not in text
    lines = [line for line in block[2].splitlines() if line.startswith("| ")]
    assert [line.replace("\N{NO-BREAK SPACE}", " ").replace("\N{NON-BREAKING HYPHEN}", "-") for line in lines[1:]] == [
        "| **e009** | | | | | |",
        "| 8_2_16 | 0.008 | 31.2 | 0.250 | 3.50 ± 0.25 | 1.50 (1.25-1.80) |",
        "| 5_1_6 | 0.008 | 31.2 | 0.250 | 3.50 ± 0.25 | 1.05 (0.90-1.20) |",
        "| 5_2_8 | 0.008 | 31.2 | 0.250 | 3.50 (one prompt) | 1.50 (one prompt) |",
        "| **e003**, replayed | | | | | |",
        "| 8_2_16 | – | 31.2 | – | 2.00 ± 0.10 | 0.80 (0.70-0.90) |",
        "| 10_3_32 | – | 31.2 | – | 2.00 ± 0.10 | – |",
    ]
    assert "Of each tree's answers at least 98% are identical to plain decoding's." in block[2]
    assert {line.count("|") for line in block[2].splitlines() if line.startswith("|")} == {7}
    assert (
        "2026-11-22, Made-up CPU, 2 cores, decoding on 2 threads, float32; `make run` took 3 min after installing."
        in block[2]
    )
    assert "e003: replayed, not measured." in block[2]


def test_a_run_without_measured_rows_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ResultRow.write_table(row for row in ROWS if row.is_replayed)
    with pytest.raises(ValueError, match="no measured row, expected at least one"):
        write(monkeypatch)


def test_the_picture_has_a_point_for_each_figure(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filled where it was measured, hollow where it was not; a line for each interval."""
    text = write(monkeypatch)
    assert "](docs/results/2026-11-22-weather-tiny.svg)" in text
    record = Path("docs/results/2026-11-22-weather-tiny.csv")
    picture = record.with_suffix(".svg").read_text(encoding="utf-8")
    assert f"<desc>{readme_picture.describe_origin(record)}</desc>" in picture
    points = re.findall(r'<use xlink:href="#\w+" x="[\d.]+" y="[\d.]+" style="fill: ([^;"]+)', picture)
    shown = {colour: points.count(colour) for colour in set(points)}
    assert shown == {"var(--s0)": 2 * 3 + 1, "var(--paper)": 2 + 1 + 1}  # tau and speedup; the legend's
    for words in (">8_2_16<", ">5_1_6 (5_1_5)<", ">e009: measured<", ">e003: tau replayed, speedup predicted<"):
        assert words in picture
    assert picture == readme_picture.render_picture(ROWS, readme_picture.describe_origin(record))


def test_served_cells_of_the_shown_trees_are_in_the_second_table(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of other trees, of the target alone, or of what the engine can't run."""
    text = write(monkeypatch)
    trees = readme_served.list_shown_trees(text)
    assert trees == ["t8_2_16", "t5_1_6", "t5_2_8"]
    shared = {"workload": "eval", "engine": "sglang", "temperature": 0.0, "status": "ran", "checkpoint": "e009"}
    measured = {
        "decoding": SPECULATIVE, "tau": 3.5, "tau_low": 3.25, "tau_high": 3.75, "accept_rate": 0.3125, "replay_tau": 3.6,
        "ttft_mean_s": 0.0081, "e2e_mean_s": 0.25, "speedup": 1.5, "speedup_low": 1.25, "speedup_high": 1.8,
    }  # fmt: skip
    ResultRow.write_table(
        [
            ResultRow(**shared, tree="t5_1_6", **measured | {"speedup_low": 0.9}),
            ResultRow(**shared, tree="t8_2_16", **measured),
            ResultRow(**shared, tree="t8_2_16", decoding="plain"),
            ResultRow(**shared, tree="t9_4_32", **measured),
            ResultRow(**shared, tree="t5_2_8", decoding=SPECULATIVE),
        ]
    )
    lines = readme_served.served_table(ResultRow.TABLE, trees).splitlines()
    shown = [line.replace("\N{NO-BREAK SPACE}", " ").replace("\N{NON-BREAKING HYPHEN}", "-") for line in lines[2:]]
    assert shown == [
        "| 8_2_16 | 0.008 | 31.2 | 0.250 | 3.50 ± 0.25 | 3.60 | 1.50 (1.25-1.80) |",
        "| 5_1_6 | 0.008 | 31.2 | 0.250 | 3.50 ± 0.25 | 3.60 | 1.50 (0.90-1.80) |",
    ]
