"""The benchmark table equals the cells bit for bit, has CPU time and replayed tau beside them, and is kept as it is printed."""

import json
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


def test_a_speedup_by_cpu_time_stands_beside_that_by_wall_time(made_up: schema.Params) -> None:
    """Another program took half of the speculative answers' wall time; a GPU has no CPU time to compare."""
    files = sorted(Path("results/cells/torch").glob("eval-*.json"))
    for file, busy in zip(files, (True, False, *[None] * len(files)), strict=False):
        cell = json.loads(file.read_text())
        for kind in ("points", "baseline_points"):
            for row in cell[kind][0]["requests"]:
                if busy is None or (busy and kind == "points"):
                    row["process_s"] = busy and row["process_s"] / 2
        file.write_text(json.dumps(cell))
    report.main()
    lines = {f"eval-{r['checkpoint']}-{r['tree']}.json": r for r in _lines(ResultRow.TABLE)}
    found = [lines[file.name] for file in files]
    assert float(found[0]["process_speedup"]) == pytest.approx(2 * float(found[0]["speedup"]))
    assert float(found[1]["process_speedup"]) == pytest.approx(float(found[1]["speedup"]))
    assert {line["process_speedup"] for line in found[2:]} == {""}
    page = report.PAGE_FILE.read_text()
    assert page.count('<th scope="col">speedup, <br>CPU time</th>') >= 1
    assert f"<td>{2 * float(found[0]['speedup']):.2f}×</td>" in page


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
