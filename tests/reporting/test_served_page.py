"""Served cells on the page and in the tables: beside plain decoding, replays and loads of the torch engine."""

import json
import re

import pytest

from stages import report
from stages.cells import replay_records
from stages.cells.cell import locate_cell
from stages.cells.table import ResultRow
from stages.params import schema
from stages.reporting import latencies
from tests.conftest import EVAL
from tests.reporting.made_up_results import ELSEWHERE, Row, _lines, make_up_served, replayed, serve, words, write_cell
from tests.served_cells import made_up as served_cell
from tests.served_cells import point


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


def test_the_torch_engines_loads_stand_beside_served_ones(
    made_up: schema.Params, capsys: pytest.CaptureFixture[str]
) -> None:
    """One workload by both engines: a table of each, each beside its own plain decoding, and each its own break-even."""
    serve(
        {"code": {**EVAL, "concurrency": [8, 64], "repeats": 1}}, torch_workloads=["eval", "code"], checkpoints=["e009"]
    )
    write_cell(served_cell("code", points=[point(200, 8, 0.02), point(200, 64, 0.02)]))
    for tree in ("t5_1_6", "t8_2_16"):
        tau = replayed(tree)
        write_cell(
            served_cell("code", "e009", tree, [point(200, 8, 0.01, tau, tree), point(200, 64, 0.015, tau, tree)])
        )
    p = schema.load_params()
    for tree in p.benchmark.trees:
        tau = replayed(tree)
        ours = [point(200, 8, 0.01, tau, tree), point(200, 64, 0.03, tau, tree)]
        plain = [point(200, 8, 0.02), point(200, 64, 0.025)]
        found = served_cell("code", "e009", tree, ours, engine="torch", baseline_points=plain, fingerprint={})
        assert write_cell(found) == locate_cell("torch", "code", "e009", tree)
    report.main()
    printed = capsys.readouterr().out
    assert (
        "code, checkpoint e009, served by sglang" in printed and "code, checkpoint e009, by the torch engine" in printed
    )
    rows = [row for row in ResultRow.read_table() if not row.is_plain and row.workload == "code"]
    speedups = {(row["engine"], row["tree"], row["concurrency"]): row["speedup"] for row in rows}
    assert len(speedups) == 2 * 2 + 2 * len(p.benchmark.trees)
    assert speedups["torch", "t8_2_16", 8.0] > 1 > speedups["torch", "t8_2_16", 64.0]
    assert min(speedups["sglang", "t8_2_16", cap] for cap in (8.0, 64.0)) > 1
    assert {row["replay_agrees"] for row in rows} == {"yes"}
    replays = {name: replay_records.read_replay(name) for name in p.replay_trees.checkpoints}
    groups = latencies.summarise_latencies(report.read_inputs(p, replays).lines)
    plain_e2e = {group.about: group.rows[-1].percentiles["e2e_s"] for group in groups if "code" in group.about}
    ours_e2e, theirs_e2e = (next(v for k, v in plain_e2e.items() if engine in k) for engine in ("torch", "sglang"))
    assert ours_e2e > theirs_e2e, "each beside its own engine's plain decoding"
    page = words(report.PAGE_FILE.read_text())
    assert "8_2_16 · code, checkpoint e009, torch" in page and "8_2_16 · code, checkpoint e009, sglang" in page
    assert "Slower than plain decoding at 1 of 2 loads" in page and "Faster than plain decoding at all 2 loads" in page
