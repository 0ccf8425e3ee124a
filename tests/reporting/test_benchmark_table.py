"""The benchmark table equals the cells bit for bit, has CPU time and replayed tau beside them, and is kept as it is printed."""

import json
import re
from pathlib import Path

import pytest

from pipeline.cli import run_command_line
from stages import report
from stages.cells import replay_records, torch_records
from stages.cells.replay_records import ReplayedTree
from stages.params import schema
from stages.params.tree_shape import TreeShape
from stages.reporting.benchmark_table import BenchmarkRow
from tests.conftest import edit_params
from tests.reporting.made_up_results import _lines, replayed


def test_the_table_equals_the_cells_bit_for_bit(made_up: schema.Params) -> None:
    report.main()
    rows = _lines(BenchmarkRow.TABLE)
    b = made_up.benchmark
    assert [(r["workload"], r["checkpoint"], r["tree"]) for r in rows] == [
        (w, c, t) for w in b.workloads for c in b.checkpoints for t in b.trees
    ]
    for row in rows:
        metrics = torch_records.read_torch_cell(row["workload"], row["checkpoint"], row["tree"]).metrics
        for name in set(row) & set(torch_records.METRICS):
            assert float(row[name]).hex() == metrics[name].hex(), name
        assert len(set(row) & set(torch_records.METRICS)) == 11


def test_columns_come_in_their_order(made_up: schema.Params) -> None:
    report.main()
    assert BenchmarkRow.TABLE.read_text().splitlines()[0] == (
        "workload,checkpoint,tree,num_steps,topk,num_draft_tokens,source,prefill_latency_s,accept_rate,e2e_latency_s,tau,"
        "tau_low,tau_high,speedup,speedup_low,speedup_high,identical_share,output_tok_s,replay_tau,process_speedup,engine,"
        "draft_sampling,weights_bytes,state_bytes,draft_parameters"
    )
    joined = report.REPLAY_TABLE.read_text().splitlines()
    assert joined[0] == ",".join(ReplayedTree.list_keys())
    assert len(joined) - 1 == len(made_up.replay_trees.list_trees()) * len(made_up.train_draft.checkpoints)


def test_a_speedup_by_cpu_time_stands_beside_that_by_wall_time(made_up: schema.Params) -> None:
    """Another program took half of the speculative answers' wall time; a GPU has no CPU time to compare."""
    files = sorted(Path("results/cells").glob("eval-*.json"))
    for file, busy in zip(files, (True, False, *[None] * len(files)), strict=False):
        cell = json.loads(file.read_text())
        for row in cell["prompts"]:
            if busy:
                row["process_s"] /= 2
            elif busy is None:
                row["process_s"] = row["baseline_process_s"] = None
        file.write_text(json.dumps(cell))
    report.main()
    lines = {f"eval-{r['checkpoint']}-{r['tree']}.json": r for r in _lines(BenchmarkRow.TABLE)}
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
        found = torch_records.read_torch_cell("eval", "e009", tree).model_dump()
        speeds = {"baseline_output_tok_s": plain_tok_s, "output_tok_s": plain_tok_s * found["metrics"]["speedup"]}
        prompts = [row | {"baseline_e2e_latency_s": answer_s} for row in found["prompts"]]
        torch_records.write_torch_cell(found | {"metrics": found["metrics"] | speeds, "prompts": prompts})
    report.main()
    assert "plain decoding: 250.0 tokens/s, the median of the measured rows" in capsys.readouterr().out
    page = report.PAGE_FILE.read_text()
    (line,) = re.findall(r'<tr class="soft last"><th scope="row">plain decoding</th>(.*)</tr>', page)
    cells = re.findall("<td>(.*?)</td>", line)
    assert (cells[0], cells[2], cells[6]) == ("0.021", "0.500", "250")


def test_replayed_tau_stands_beside_the_served_one_where_the_grid_has_the_tree(made_up: schema.Params) -> None:
    path = Path(f"results/replay/{made_up.benchmark.checkpoints[0]}.csv")
    kept = [line for line in path.read_text().splitlines() if ",8,2,16," not in line]
    path.write_text("\n".join(kept) + "\n")
    report.main()
    replayed = {(r["checkpoint"], r["tree"]): r["replay_tau"] for r in _lines(BenchmarkRow.TABLE)}
    first, other = made_up.benchmark.checkpoints[:2]
    assert replayed[first, "t8_2_16"] == ""
    line = next(line for line in Path(f"results/replay/{other}.csv").read_text().splitlines() if ",8,2,16," in line)
    assert replayed[other, "t8_2_16"] == line.split(",")[4]


def test_cells_above_temperature_0_stand_beside_the_replay_of_answers_drawn_alike(
    made_up: schema.Params, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their answers are drawn, so none is held against plain decoding's; the best checkpoint is that of temperature 0."""
    checkpoint, tree = made_up.benchmark.checkpoints[0], TreeShape.parse("t8_2_16")
    path = replay_records.locate_replay(checkpoint)
    report.main()
    best = json.loads(report.METRICS_FILE.read_text())["checkpoints"]
    trees = replay_records.read_replay(checkpoint)
    hot = [row.model_copy(update={"tau": row.tau - 0.5, "temperature": 0.7, "top_p": 0.9}) for row in trees]
    ReplayedTree.write_csv(path, [*trees, *hot])
    found = torch_records.read_torch_cell("eval", checkpoint, tree.name).model_dump()
    cold = replayed(tree.name, checkpoint)
    drawn = {"temperature": 0.7, "top_p": 0.9, "metrics": found["metrics"] | {"identical_share": None}}
    taus = {}
    other = {"otherwise": drawn | {"top_p": 1.0}, "sampled drafts": drawn | {"draft_sampling": "sampled"}}
    for name, how in {"greedy": {}, "drawn": drawn, **other}.items():
        torch_records.write_torch_cell(found | how)
        report.main()
        (line,) = (r for r in _lines(BenchmarkRow.TABLE) if (r["checkpoint"], r["tree"]) == (checkpoint, tree.name))
        taus[name] = line["replay_tau"], line["identical_share"]
        assert json.loads(report.METRICS_FILE.read_text())["identical_share_min"] == 1.0
    assert taus == {"greedy": (str(cold), "1.0"), "drawn": (str(cold - 0.5), ""), **dict.fromkeys(other, ("", ""))}
    table = capsys.readouterr().out.rsplit("e003, the best", 1)[-1]
    assert any(line.endswith("–") and line.startswith("8_2_16") for line in table.splitlines())
    for name, now in json.loads(report.METRICS_FILE.read_text())["checkpoints"].items():
        assert now["mean_replay_tau"] == best[name]["mean_replay_tau"]
    for name in made_up.benchmark.checkpoints:
        for other in made_up.benchmark.trees:
            torch_records.write_torch_cell(torch_records.read_torch_cell("eval", name, other).model_dump() | drawn)
    report.main()
    assert json.loads(report.METRICS_FILE.read_text())["identical_share_min"] is None
    assert "same answers as plain" not in report.PAGE_FILE.read_text()


@pytest.mark.usefixtures("made_up")
def test_the_table_is_kept_as_it_was_printed(capsys: pytest.CaptureFixture[str]) -> None:
    report.main()
    printed = capsys.readouterr().out
    run_command_line(["table"])
    assert capsys.readouterr().out == printed
    assert re.search(r"^tree +prefill +accept rate +e2e +tau", printed, re.MULTILINE)
    row = next(r for r in _lines(BenchmarkRow.TABLE) if r["tree"] == "t8_1_9")
    assert re.search(rf"^8_1_9 \(8_1_8\) .* {float(row['tau']):.2f} ", printed, re.MULTILINE)
    assert "the best checkpoint by replayed tau" in printed


def test_table_without_a_report_says_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"table\.txt not found; run: aerie run"):
        run_command_line(["table"])
