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
