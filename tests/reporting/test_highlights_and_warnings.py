"""What the page and the terminal highlight, warn of and call the best, and what they leave without a mark."""

import html
import json
import re

import pytest

from stages import report
from stages.cells.cell import Cell, locate_cell
from stages.cells.table import ResultRow
from stages.params import schema
from tests.reporting.made_up_results import _lines


def test_a_speedup_is_emphasised_only_where_its_interval_lies_above_1(half_measured: schema.Params) -> None:
    """Bug: the highest speedup of a table was coloured, also where it was below 1 or its interval held 1."""
    for tree, low in (("t8_2_16", 0.97), ("t5_1_6", 1.0), ("t10_2_32", None)):
        found = Cell.read("torch", "eval", "e009", tree)
        speeds = found.points[0].in_turns
        assert speeds
        speeds.speedup_low, speeds.speedup_high = low, low and speeds.speedup_high
        found.write()
    report.main()
    rows = _lines(ResultRow.TABLE)
    faster = [row for row in rows if float(row["speedup_low"] or 0) > 1]
    others = {(row["checkpoint"], row["tree"]) for row in rows if row not in faster}
    assert faster and others == {("e009", tree) for tree in ("t8_2_16", "t5_1_6", "t10_2_32")}
    page = report.PAGE_FILE.read_text()
    results = page[page.index('id="results"') : page.index('id="latencies"')]
    assert re.findall(r'<td class="top">([\d.]+)×', results) == [f"{float(row['speedup']):.2f}" for row in faster]


def test_a_cell_measured_beside_a_busy_process_is_marked_and_named_at_the_top(
    made_up: schema.Params, capsys: pytest.CaptureFixture[str]
) -> None:
    path = locate_cell("torch", "eval", "e009", "t8_2_16")
    found = json.loads(path.read_text())
    found["points"][0]["process_share"] = 0.5
    path.write_text(json.dumps(found))
    report.main()
    printed, page = capsys.readouterr().out, report.PAGE_FILE.read_text()
    (warning,) = [line for line in printed.splitlines() if "another process had the CPU" in line]
    assert warning.endswith("computed 50% of the wall time; again: dvc repro -fs benchmark@eval-e009-t8_2_16")
    assert printed.splitlines().index(warning) < printed.splitlines().index("")
    assert len(re.findall(r"^8_2_16 ! ", printed, re.MULTILINE)) == 1
    assert html.escape(warning.removeprefix("! ")) in page and page.count('">!</span></th>') == 1
    verdict = json.loads(report.METRICS_FILE.read_text())["verdict"]
    assert verdict["kind"] == "launch" and printed.startswith(f"{verdict['text']}\n")
    assert f"<h1>{made_up.report.title}</h1>" in page and f'<p class="headline">{verdict["text"]}.</p>' in page


def test_the_best_checkpoint_is_the_one_with_the_highest_mean_replayed_tau(made_up: schema.Params) -> None:
    report.main()
    metrics = json.loads(report.METRICS_FILE.read_text())
    taus: dict[str, list[float]] = {}
    for line in _lines(report.REPLAY_TABLE):
        taus.setdefault(line["checkpoint"], []).append(float(line["tau"]))
    means = {name: sum(values) / len(values) for name, values in taus.items()}
    assert metrics["best_checkpoint"] == max(means, key=means.__getitem__)
    for name, found in metrics["checkpoints"].items():
        assert found["mean_replay_tau"] == pytest.approx(means[name])
        mine = [row for row in _lines(ResultRow.TABLE) if row["checkpoint"] == name]
        assert found["best_by_tau"]["tau"] == max(float(row["tau"]) for row in mine)
        assert found["best_by_speedup"]["speedup"] == max(float(row["speedup"]) for row in mine)
        assert found["best_by_speedup"]["speedup_low"] > 1
