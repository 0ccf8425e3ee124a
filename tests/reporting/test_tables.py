"""The benchmark table equals the cells bit for bit, and shows what is faster, what no draft can grow, and nothing unlisted."""

import re
from pathlib import Path

import pytest

from pipeline.cli import run_command_line
from stages import report
from stages.cells.cell import Cell
from stages.cells.table import ResultRow
from stages.params import schema
from tests.conftest import edit_params
from tests.reporting.made_up_results import _lines, write_cell
from tests.served_cells import made_up as served_cell


def test_the_table_equals_the_cells_bit_for_bit(made_up: schema.Params) -> None:
    report.main()
    rows = _lines(ResultRow.TABLE)
    b = made_up.benchmark
    assert [(r["workload"], r["checkpoint"], r["tree"]) for r in rows] == [
        (w, c, t) for w in b.workloads for c in b.checkpoints for t in b.trees
    ]
    for row in rows:
        point = Cell.read("torch", row["workload"], row["checkpoint"], row["tree"]).points[0]
        for part in (point.acceptance, point.in_turns):
            known = {k: v for k, v in part.model_dump(include=set(row)).items() if isinstance(v, float)}
            assert known and {name: float(row[name]).hex() for name in known} == {k: v.hex() for k, v in known.items()}
        assert point.loads[0].e2e_s and float(row["e2e_mean_s"]).hex() == point.loads[0].e2e_s.mean.hex()


def test_plain_decoding_is_the_median_of_two_cells_too(
    made_up: schema.Params, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: of an even number of rows it was the slower middle one, and called the median."""
    trees = made_up.benchmark.trees[:2]
    edit_params(Path(), {"benchmark": {"checkpoints": ["e009"], "trees": trees}})
    for tree, plain_tok_s, answer_s in zip(trees, (200.0, 300.0), (0.6, 0.4), strict=True):
        found = Cell.read("torch", "eval", "e009", tree).model_dump()
        (load,) = found["baseline_points"][0]["loads"]
        means = {kind: load[kind] | {"mean": mean} for kind, mean in (("e2e_s", answer_s), ("ttft_s", 0.021))}
        load |= {"output_throughput": plain_tok_s} | means
        write_cell(found)
    report.main()
    assert "plain decoding: 250.0 tokens/s, the median of the measured rows" in capsys.readouterr().out
    page = report.PAGE_FILE.read_text()
    (line,) = re.findall(r'<tr class="soft last"><th scope="row">plain decoding</th>(.*)</tr>', page)
    cells = re.findall("<td>(.*?)</td>", line)
    assert (cells[0], cells[2], cells[6]) == ("0.021", "0.500", "250")


def test_table_without_a_report_says_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"table\.txt not found; run: aerie run"):
        run_command_line(["table"])


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
