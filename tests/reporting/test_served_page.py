"""Served cells on the page and in the tables: beside plain decoding, replays and loads of the torch engine."""

import json
import re

import pytest

from stages import report
from stages.cells.table import ResultRow
from stages.params import schema
from tests.conftest import EVAL
from tests.reporting.made_up_results import ELSEWHERE, Row, _lines, make_up_served, replayed, serve, words


def served_lines() -> list[Row]:
    return [row for row in _lines(ResultRow.TABLE) if row["in_turns"] == "False"]


def test_served_cells_stand_beside_plain_decoding_and_replays(
    made_up: schema.Params, capsys: pytest.CaptureFixture[str]
) -> None:
    serve({"code": {**EVAL, "concurrency": 64, "repeats": 3}})
    make_up_served("code")
    report.main()
    chain, baseline_row, other = sorted(served_lines(), key=lambda r: (r["tree"] != "t5_1_6", r["tree"]))
    assert (baseline_row["decoding"], other["status"]) == ("plain", "unsupported")
    assert chain["replay_agrees"] == "yes" and float(chain["speedup_low"]) < float(chain["speedup"])
    page = report.PAGE_FILE.read_text()
    said = words(page)
    assert f"{float(chain['speedup']):.2f}×" in said and f"{replayed('t5_1_6'):.2f} × 1.00" in said
    assert "unsupported: topk above 1 isn&#39;t built there" in said and f"{replayed('t8_2_16'):.2f}" in said
    assert 'class="off"' not in page
    parts = ["Memory", "Right answers", "The engine's own figures", "spec_accept_length", "Warnings", "launch_server"]
    for part in parts:
        assert part in said
    assert "&lt;b&gt;hot" in page and "<b>hot" not in page
    assert "When not to speculate" not in page
    assert re.search(r"^5_1_6 \(5_1_5\) +200 x 64 ", capsys.readouterr().out, re.MULTILINE)
    assert not re.search(ELSEWHERE, page) and page.count("<script") == 1
    found = json.loads(report.METRICS_FILE.read_text())["served"]
    assert (found["points"], found["plain_points"], found["unsupported"], found["off_replay"]) == (1, 1, 1, 0)
    assert found["best_by_speedup"]["speedup"] == float(chain["speedup"])


def test_a_tau_far_from_the_replayed_one_is_a_red_row_that_says_why(made_up: schema.Params) -> None:
    serve({"code": {**EVAL, "concurrency": 64, "repeats": 3}})
    make_up_served("code", off=0.7)
    report.main()
    page = report.PAGE_FILE.read_text()
    assert page.count('<tr class="off">') == 1
    assert f"is 0.70 of the replayed {replayed('t5_1_6'):.2f}. A replay accepts exactly what this draft" in words(page)
    assert json.loads(report.METRICS_FILE.read_text())["served"]["off_replay"] == 1
