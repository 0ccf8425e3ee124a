"""report: the table says what the cells say, bit for bit; it reads what params.yaml lists; the page needs no network."""

import csv
import html
import json
import math
import random
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from pipeline.cli import run_command_line
from stages import report
from stages.params import schema
from stages.params.section import ROOT_CHECKPOINT
from stages.params.tree_shape import TreeShape
from stages.reporting.benchmark_table import BenchmarkRow
from stages.results import replay_records, served_records, timing_grid, torch_records
from stages.results.prediction import PredictedSpeedup
from stages.results.replay_records import ReplayedTree, TreeBucket
from stages.results.served_table import ServedRow
from stages.runtime import atomic
from stages.telemetry import stage_log
from tests import costs, made_once
from tests.conftest import EVAL, edit_params
from tests.served_cells import FINGERPRINT, point, sweep
from tests.served_cells import made_up as served_cell

ROOT = Path(__file__).parent.parent
Row = dict[str, Any]
SPENT = [
    "fix_data", "prepare_target", "sample_target", "extract_hiddens", "init_draft@e000", "check_overfit@e000", "train_draft@e003",
    "train_draft@e009", "replay_trees@e003", "replay_trees@e009", "time_trees@e000", "prepare_prompts@eval",
]  # fmt: skip
PLOTS = 7 + 3  # the last three of latencies
PICTURE = '<svg role="img"'  # each has a second one over it, of its points
ELSEWHERE = r"https?:|//[a-z]|<link|<img|@import|url\((?!#)|\bsrc=|\b(fetch|import)\("  # what a page loads from
INSIDE = 4  # more, of what happens inside trees, where any was looked into


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> schema.Params:
    return made_up_project(tmp_path, monkeypatch)


def made_up_project(folder: Path, monkeypatch: pytest.MonkeyPatch) -> schema.Params:
    """A project whose results are made up; we stand in it from now on.

    It has the repository's own params.yaml, but for cells of every checkpoint.
    """
    monkeypatch.chdir(folder)
    made_once.make_once(monkeypatch)
    text = (ROOT / "params.yaml").read_text()
    text, found = re.subn(r"\[e009\] .*(\n  trees: \[t8_1_9,)", r"[e003, e009]\1", text)
    assert found == 1, "benchmark.checkpoints is no longer [e009] with a comment"
    Path("params.yaml").write_text(text)
    p = schema.load_params()
    make_up_results(p)
    return p


def make_up_results(p: schema.Params) -> None:
    """Cells, replays and stage reports that could be true: accept lengths fall off with depth, epochs help or hurt."""
    chance = random.Random(4)
    skill = {name: 0.80 - 0.03 * i for i, name in enumerate(p.train_draft.checkpoints)}
    for workload in p.benchmark.torch_workloads:
        for checkpoint in p.benchmark.checkpoints:
            for name in p.benchmark.trees:
                torch_records.write_torch_cell(
                    _made_up_cell(chance, workload, checkpoint, TreeShape.parse(name), skill[checkpoint])
                )
    for checkpoint, segment in p.train_draft.checkpoints.items():
        lines = [",".join(ReplayedTree.list_keys())]
        for tree in p.replay_trees.list_trees():
            tau = _tau(skill[checkpoint], tree) + chance.uniform(-0.15, 0.15)
            rate = (tau - 1) / tree.num_steps
            shape = tree.num_steps, tree.topk, tree.num_draft_tokens
            counted = 900, round(900 * (tau - 1)), tree.num_steps - 0.5, " ".join(["0.8"] * tree.num_steps)
            lines.append(
                ",".join(
                    map(
                        str, (checkpoint, *shape, tau, tau - 0.1, tau + 0.1, rate, *counted, tau, "", 0.0, "", "greedy")
                    )
                )
            )
        atomic.write_text(Path(f"results/replay/{checkpoint}.csv"), "\n".join(lines) + "\n")
        TreeBucket.write_csv(replay_records.locate_tree_statistics(checkpoint), [])
        epochs = [
            {
                "epoch": e,
                "loss": 9 * 0.8 ** (e + 3 * (segment.from_ != ROOT_CHECKPOINT)),
                "step_loss": [1.0] * 7,
                "step_accuracy": [skill[checkpoint] * 0.94**k for k in range(7)],
            }
            for e in range(1, segment.epochs + 1)
        ]
        done = {
            "checkpoint": checkpoint,
            "from": segment.from_,
            "epochs": epochs,
            "seconds": 12.5,
            "weights": "ab" * 32,
        }
        atomic.write_json(Path(f"results/train/{checkpoint}.json"), done)
    timing_grid.write_timing_grid(costs.made_up(model=p.target.model))
    make_up_spent(*SPENT)
    for stage, (name, _) in report.STAGE_REPORTS.items():
        atomic.write_json(Path(f"results/{name}.json"), _made_up_report(stage))


def make_up_spent(*stages: str, seconds: float = 60.0, gpus: tuple[str, ...] = (), joules: float | None = None) -> None:
    """Add a line to the log of runs for each stage, named as train_draft@e003."""
    stage_log.LOG_FILE.parent.mkdir(exist_ok=True)
    with stage_log.LOG_FILE.open("a") as log:
        for stage in stages:
            run = stage_log.StageRun(stage, 0, 1, {}, seconds, list(gpus), joules)
            log.write(json.dumps(asdict(run)) + "\n")


def make_up_import(name: str) -> None:
    make_up_spent(*(f"{stage}@{name}" for stage in ("import_draft", "replay_trees", "time_trees")))
    atomic.write_json(Path(f"results/train/{name}.json"), {"checkpoint": name, "weights": "cd" * 32})


def made_up_inside(checkpoint: str, trees: list[TreeShape]) -> list[TreeBucket]:
    """Buckets that could be true: 60 cycles a tree, half of what is promised is kept."""
    buckets = {
        "row": ("q1.0", "q2.0"), "context": ("64-96", "96-128"), "answer": ("0-8", "8-12"), "after": ("digits", "letters"),
        "token": ("digits", "structure"), "sibling": ("1", "2", "3"), "chance": ("0.01-0.02", "0.9-1"),
    }  # fmt: skip
    return [
        TreeBucket(
            checkpoint=checkpoint,
            tree=tree.name,
            by=what,
            bucket=bucket,
            promised=80.0,
            accepted=40,
            cycles=None if what in ("sibling", "chance") else 30,
            nodes=30 * (tree.num_draft_tokens - 1),
        )
        for tree in trees
        for what, names in buckets.items()
        for bucket in names
    ]


def _made_up_cell(chance: random.Random, workload: str, checkpoint: str, tree: TreeShape, skill: float) -> Row:
    tau = _tau(skill, tree) + chance.uniform(-0.1, 0.1)
    speedup = tau / (1.18 + 0.06 * tree.num_steps + 0.01 * tree.num_draft_tokens)
    latency, prompts = chance.uniform(0.55, 0.65), 12
    metrics = {
        "tau": tau, "tau_low": tau - chance.uniform(0.1, 0.3), "tau_high": tau + chance.uniform(0.1, 0.3),
        "accept_rate": (tau - 1) / tree.num_steps, "node_accept_rate": (tau - 1) / (tree.num_draft_tokens - 1),
        "prefill_latency_s": 0.021 + chance.random() / 1000, "e2e_latency_s": latency / speedup,
        "output_tok_s": 210 * speedup, "baseline_output_tok_s": 210.0, "speedup": speedup, "speedup_low": speedup * 0.95,
        "speedup_high": speedup * 1.04, "identical_share": 1.0,
    }  # fmt: skip
    prompt = dict.fromkeys(torch_records.PROMPT_COLUMNS, 0) | {
        "finish_reason": "stop",
        "baseline_prefill_latency_s": 0.021,
        "baseline_e2e_latency_s": latency,
        "baseline_output_tokens": 120,
        "output_tokens": 120,
        "process_s": latency / speedup,
        "baseline_process_s": latency,
        "prefill_latency_s": 0.021,
        "e2e_latency_s": latency / speedup,
    }
    shares = [math.exp(-(((i - tau + 1) / (0.3 * tree.num_steps)) ** 2)) for i in range(tree.num_steps + 1)]
    return {
        "workload": workload,
        "checkpoint": checkpoint,
        "tree": tree.name,
        "num_steps": tree.num_steps,
        "topk": tree.topk,
        "num_draft_tokens": tree.num_draft_tokens,
        "engine": "torch",
        "definitions": torch_records.DEFINITIONS,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": None,
        "metrics": metrics,
        "histogram": [round(360 * s / sum(shares)) for s in shares],
        "prompts": [prompt | {"id": f"row{i}.0"} for i in range(prompts)],
        "hardware": {"cpu": "Made-up CPU, 2 cores", "system": "Linux", "python": "3.11.9"},
        "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
        "seconds": 3.4,
        "seed": 0,
        "gpus": [],
        "joules": None,
        "repeats": [{"output_tok_s": 210 * speedup, "baseline_output_tok_s": 210.0, "speedup": speedup}],
        "quality": None,
    }


def _tau(skill: float, tree: TreeShape) -> float:
    p = min(0.95, skill + 0.04 * (tree.topk > 1) - 0.004 * tree.topk)
    depth = min(tree.num_steps, 2 + (tree.num_draft_tokens - 1) / (1 + 0.7 * (tree.topk - 1)))
    return (1 - p ** (depth + 1)) / (1 - p)


def _made_up_report(stage: str) -> Row:
    fixed = "[2]{hour,temp}:\n  08,12.5\n  09,13.1"
    return {
        "fix_data": {
            "rows_in": 300, "clean": 200, "repaired": 80, "dropped": 20, "rows_out": 280, "train": 238, "eval": 42,
            "rules": {"fence": 61, "row_count": 25}, "dropped_reasons": {"duplicate": 12, "no table": 8}, "seconds": 0.4,
            "formats": {"sharegpt": 290, "prompt_answer": 10}, "overlap": {"policy": "keep", "exact": 3, "near": 5},
            "hub": {"talk.hub.yaml": {"dataset": "someone/talk", "split": "train", "commit": "8049631c", "rows": 10}},
            "near_duplicates": {
                "threshold": 0.8, "measure": "MinHash", "dropped": 7,
                "examples": [{"first": "a\nOslo", "second": "a\nBergen <b>", "likeness": 0.875}],
            },
            "examples": {
                "fence": {"before": f"Here it is:\n```toon\n{fixed}\n```", "after": fixed},
                "row_count": {"before": fixed.replace("[2]", "[3]"), "after": fixed},
            },
        },
        "sample_target": {
            "rows_in": 280, "rows_out": 260, "dropped": {"not asked for": 20}, "seconds": 21.0, "tokens": 31000,
            "sources": {
                "train": {f"part-{n}<b>.jsonl": {"asked": 11, "not_asked": 2} for n in range(22)},
                "eval": {"eval.jsonl": {"asked": 42, "not_asked": 0}},
            },
            "preview": [
                {"id": "q7.0", "prompt": "<|im_start|>user\nIs 2 < 3 & <b>so</b>?<|im_end|>\n", "answer": "<i>yes</i>\n</mark>",
                 "prompt_tokens": 9, "answer_tokens": 3, "finish_reason": "stop"},
            ],
        },
        "extract_hiddens": {"rows_in": 260, "rows_out": 258, "dropped": {"longer than max_length": 2}, "seconds": 4.0},
        "init_draft@e000": {"draft_vocab_size": 320, "target_vocab_size": 512, "coverage_train": 0.9991, "coverage_eval": 0.9985},
        "check_overfit@e000": {
            "tau": 7.6, "min_tau": 6.0, "required_tau": 5.71, "steps": 120, "losses": [5.0, 0.2], "seconds": 6.0,
        },
    }[stage]  # fmt: skip


def _lines(place: Path) -> list[Row]:
    with place.open(newline="") as lines:
        return list(csv.DictReader(lines))


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


def test_the_page_says_what_the_overfit_gate_required(made_up: schema.Params) -> None:
    """Bug: the page showed check_overfit.min_tau as required, which is scaled, and at 1.0 called an unlearned row learnt."""
    report.main()
    page = " ".join(report.PAGE_FILE.read_text().split())
    assert "the draft reached tau 7.60 in 120 steps (at least 5.71 is required)." in page
    place = Path("results/train/e000.overfit.json")
    atomic.write_json(place, json.loads(place.read_text()) | {"min_tau": 1.0, "required_tau": 1.0, "tau": 1.02})
    report.main()
    page = " ".join(report.PAGE_FILE.read_text().split())
    assert "reached tau 1.02 in 120 steps (check_overfit.min_tau is 1.0: nothing was required, so" in page
    blocks = {"dflash9": {"tau": 7.25, "perfect_tau": 8.0, "required_tau": 6.0}}
    atomic.write_json(place, json.loads(place.read_text()) | {"block_drafts": blocks})
    report.main()
    page = " ".join(report.PAGE_FILE.read_text().split())
    assert "The block draft of dflash9 reached 7.25 of 8.00 (6.00 is required)." in page


def test_the_page_shows_what_is_trained_on_and_escapes_it(made_up: schema.Params) -> None:
    """An answer may hold any text: a page that ran it as HTML would show another mask, or worse."""
    report.main()
    page = report.PAGE_FILE.read_text()
    assert "<strong>q7.0</strong>: 3 of 12 tokens, a whole answer" in page
    assert (
        '<pre class="masked" tabindex="0" role="region" aria-label="Training row q7.0">'
        "<span>&lt;|im_start|&gt;user\nIs 2 &lt; 3 &amp; &lt;b&gt;so&lt;/b&gt;?&lt;|im_end|&gt;\n</span>"
        "<mark>&lt;i&gt;yes&lt;/i&gt;\n&lt;/mark&gt;</mark></pre>"
    ) in page


def test_columns_come_in_their_order(made_up: schema.Params) -> None:
    report.main()
    assert BenchmarkRow.TABLE.read_text().splitlines()[0] == (
        "workload,checkpoint,tree,num_steps,topk,num_draft_tokens,source,tau,tau_low,tau_high,accept_rate,prefill_latency_s,"
        "e2e_latency_s,output_tok_s,speedup,speedup_low,speedup_high,identical_share,replay_tau,engine,process_speedup,draft_sampling"
    )
    joined = report.REPLAY_TABLE.read_text().splitlines()
    assert joined[0] == ",".join(ReplayedTree.list_keys())
    assert len(joined) - 1 == len(made_up.replay_trees.list_trees()) * len(made_up.train_draft.checkpoints)


def test_a_speedup_by_cpu_time_stands_beside_that_by_wall_time(made_up: schema.Params) -> None:
    """Another program took half of the speculative answers' wall time; a GPU has no CPU time to compare."""
    places = sorted(Path("results/cells").glob("eval-*.json"))
    for place, busy in zip(places, (True, False, *[None] * len(places)), strict=False):
        cell = json.loads(place.read_text())
        for row in cell["prompts"]:
            if busy:
                row["process_s"] /= 2
            elif busy is None:
                row["process_s"] = row["baseline_process_s"] = None
        place.write_text(json.dumps(cell))
    report.main()
    lines = {f"eval-{r['checkpoint']}-{r['tree']}.json": r for r in _lines(BenchmarkRow.TABLE)}
    found = [lines[place.name] for place in places]
    assert float(found[0]["process_speedup"]) == pytest.approx(2 * float(found[0]["speedup"]))
    assert float(found[1]["process_speedup"]) == pytest.approx(float(found[1]["speedup"]))
    assert {line["process_speedup"] for line in found[2:]} == {""}
    page = report.PAGE_FILE.read_text()
    assert page.count('<th scope="col">speedup, <br>CPU time</th>') >= 1
    assert f"<td>{2 * float(found[0]['speedup']):.2f}×</td>" in page


def test_replayed_tau_stands_beside_the_served_one_where_the_grid_has_the_tree(made_up: schema.Params) -> None:
    place = Path(f"results/replay/{made_up.benchmark.checkpoints[0]}.csv")
    kept = [line for line in place.read_text().splitlines() if ",8,2,16," not in line]
    place.write_text("\n".join(kept) + "\n")
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
    place = replay_records.locate_replay(checkpoint)
    report.main()
    best = json.loads(report.METRICS_FILE.read_text())["checkpoints"]
    trees = replay_records.read_replay(checkpoint)
    hot = [row.model_copy(update={"tau": row.tau - 0.5, "temperature": 0.7, "top_p": 0.9}) for row in trees]
    ReplayedTree.write_csv(place, [*trees, *hot])
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


@pytest.fixture
def half_measured(made_up: schema.Params) -> schema.Params:
    """The project with the repository's own params.yaml: e009 has cells, e003 was replayed only."""
    Path("params.yaml").write_bytes((ROOT / "params.yaml").read_bytes())
    for place in torch_records.CELLS_FOLDER.glob("*-e003-*"):
        place.unlink()
    return schema.load_params()


@pytest.mark.parametrize(("draft_sampling", "less"), [("greedy", 0.5), ("sampled", 0.25)])
def test_rows_and_predictions_above_temperature_0_are_of_the_drafts_that_cells_have(
    half_measured: schema.Params, draft_sampling: str, less: float
) -> None:
    """A chain has a replay of each kind on the same answers, and one tau beside the cells'."""
    cold = [tree for tree in replay_records.read_replay("e003") if tree.shape.name == "t8_1_9"]
    hot = {"temperature": 0.7, "top_p": 1.0}
    kinds = [hot | {"tau": cold[0].tau - 0.5}, hot | {"tau": cold[0].tau - 0.25, "draft_sampling": "sampled"}]
    place = replay_records.locate_replay("e003")
    ReplayedTree.write_csv(place, [*cold, *(cold[0].model_copy(update=kind) for kind in kinds)])
    workload = half_measured.benchmark.workloads["eval"].model_copy(update={"temperature": 0.7})
    changes = {"draft_sampling": draft_sampling, "workloads": {"eval": workload}}
    p = half_measured.model_copy(update={"benchmark": half_measured.benchmark.model_copy(update=changes)})
    report.write_report(p)
    (row,) = (r for r in BenchmarkRow.read_table() if r.checkpoint == "e003")
    (guess,) = (r for r in PredictedSpeedup.read_table() if (r.checkpoint, r.engine) == ("e003", "torch"))
    for found in (row, guess):
        assert (found.tau, found.draft_sampling) == (pytest.approx(cold[0].tau - less), draft_sampling)
    assert row.speedup == guess.speedup and guess.temperature == 0.7


def test_a_checkpoint_without_cells_has_replayed_tau_and_predicted_speedup(
    half_measured: schema.Params, capsys: pytest.CaptureFixture[str]
) -> None:
    report.main()
    rows = _lines(BenchmarkRow.TABLE)
    trees = half_measured.benchmark.trees
    assert [(r["checkpoint"], r["tree"], r["source"]) for r in rows] == [
        *(("e009", tree, "measured") for tree in trees),
        *(("e003", tree, "replayed") for tree in trees),
    ]
    predicted = {
        (r["checkpoint"], f"t{r['num_steps']}_{r['topk']}_{r['num_draft_tokens']}"): r
        for r in _lines(PredictedSpeedup.TABLE)
    }
    replayed_trees = {tree.shape.name: tree for tree in replay_records.read_replay("e003")}
    for row in rows[len(trees) :]:
        guess, tree = predicted["e003", row["tree"]], replayed_trees[row["tree"]]
        assert float(row["tau"]) == float(row["replay_tau"]) == tree.tau
        assert (float(row["tau_low"]), float(row["tau_high"])) == (tree.tau_low, tree.tau_high)
        assert float(row["accept_rate"]) == tree.accept_rate
        assert [row[name] for name in ("speedup", "speedup_low", "speedup_high")] == [
            guess[name] for name in ("speedup", "low", "high")
        ]
        timed = "prefill_latency_s", "e2e_latency_s", "output_tok_s", "identical_share"
        assert {row[name] for name in timed} == {""} and row["engine"] == "torch"
    found = json.loads(report.METRICS_FILE.read_text())
    assert found["cells"] == len(trees) and "best_by_tau" not in found["checkpoints"]["e003"]
    printed = capsys.readouterr().out
    first, last = rows[0], rows[-1]
    assert re.search(rf"^8_1_9 \(8_1_8\) +\d.* {float(first['tau']):.2f} .*100$", printed, re.MULTILINE)
    assert re.search(
        rf"^10_3_32 \* +– .* – .* {float(last['tau']):.2f} ± 0.10 +{float(last['speedup']):.2f}x \(.*–$",
        printed,
        re.MULTILINE,
    )
    assert printed.count("* not measured: tau replayed over the eval split") == 1
    assert printed.count("tokens/s, the median of the measured rows") == 1
    assert Path("results/report/table.txt").read_text() == printed
    said = words(report.PAGE_FILE.read_text())
    assert "replayed · eval, not measured: tau of the whole eval split, predicted speedup" in said
    assert said.count("A table tagged “replayed” has no cells") == 1


def test_a_replayed_tree_outside_the_timing_grid_has_no_speedup(
    half_measured: schema.Params, capsys: pytest.CaptureFixture[str]
) -> None:
    timed = [point for point in costs.grid() if point["num_steps"] <= 6]
    timing_grid.write_timing_grid(costs.made_up(model=half_measured.target.model, points=timed))
    report.main()
    rows = {row["tree"]: row for row in _lines(BenchmarkRow.TABLE) if row["source"] == "replayed"}
    assert {tree for tree, row in rows.items() if not row["speedup"]} == {
        tree for tree in half_measured.benchmark.trees if TreeShape.parse(tree).num_steps > 6
    }
    assert re.search(r"^10_3_32 \* .* ± 0.10 +– +–$", capsys.readouterr().out, re.MULTILINE)


def test_a_tree_that_was_not_replayed_has_no_line(half_measured: schema.Params) -> None:
    edit_params(Path(), {"replay_trees": {"topk": [1, 2]}})
    few = [tree for tree in replay_records.read_replay("e003") if tree.topk <= 2]
    ReplayedTree.write_csv(replay_records.locate_replay("e003"), few)
    report.main()
    rows = [row["tree"] for row in _lines(BenchmarkRow.TABLE) if row["source"] == "replayed"]
    assert rows == [tree for tree in half_measured.benchmark.trees if TreeShape.parse(tree).topk <= 2]


@pytest.mark.parametrize(
    ("workload", "taken"),
    [
        ({}, "cold"),
        ({"temperature": 0.7, "top_p": 0.9}, "hot"),
        ({"temperature": 0.7, "top_p": 1.0}, None),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 20}, None),
        ({"prompts": "gsm8k"}, None),
        ({"ignore_eos": True}, None),
        ({"concurrency": 8}, None),
    ],
)
def test_only_what_replay_has_answers_of_is_in_the_table(
    half_measured: schema.Params, workload: Row, taken: str | None
) -> None:
    """Other prompts, text beyond the end, and answers drawn otherwise have no replay; loads have a table of their own."""
    known = replay_records.read_replay("e003")
    hot = [tree.model_copy(update={"tau": tree.tau - 0.5, "temperature": 0.7, "top_p": 0.9}) for tree in known]
    ReplayedTree.write_csv(replay_records.locate_replay("e003"), [*known, *hot])
    edit_params(
        Path(),
        {
            "benchmark": {
                "workloads": {"eval": EVAL, "other": {**EVAL, **workload}}, "torch_workloads": ["other"],
                "checkpoints": ["e009"], "trees": ["t8_2_16"],
            }
        },
    )  # fmt: skip
    make_up_spent("prepare_prompts-other")
    p = schema.load_params()
    replays = {name: replay_records.read_replay(name) for name in p.replay_trees.checkpoints}
    rows = report._build_replayed_rows(p, replays, [])
    cold = replayed("t8_2_16", "e003")
    expected = {"cold": [cold], "hot": [cold - 0.5], None: []}[taken]
    assert [(row.workload, row.checkpoint, row.tau) for row in rows] == [("other", "e003", tau) for tau in expected]


def test_a_speedup_is_emphasised_only_where_its_interval_lies_above_1(half_measured: schema.Params) -> None:
    """Bug: the highest speedup of a table was coloured, also where it was below 1 or its interval held 1."""
    for tree, low in (("t8_2_16", 0.97), ("t5_1_6", 1.0), ("t10_2_32", None)):
        found = torch_records.read_torch_cell("eval", "e009", tree).model_dump()
        ends = {"speedup_low": low, "speedup_high": low and found["metrics"]["speedup_high"]}
        torch_records.write_torch_cell(found | {"metrics": found["metrics"] | ends})
    report.main()
    rows = _lines(BenchmarkRow.TABLE)
    faster = [row for row in rows if float(row["speedup_low"] or 0) > 1]
    others = {(row["checkpoint"], row["tree"]) for row in rows if row not in faster}
    assert faster and others == {("e009", tree) for tree in ("t8_2_16", "t5_1_6", "t10_2_32")}
    page = report.PAGE_FILE.read_text()
    results = page[page.index('id="results"') : page.index('id="latencies"')]
    assert re.findall(r'<td class="top">([\d.]+)×', results) == [f"{float(row['speedup']):.2f}" for row in faster]


def test_a_cell_measured_beside_a_busy_process_is_marked_and_named_at_the_top(
    made_up: schema.Params, capsys: pytest.CaptureFixture[str]
) -> None:
    place = torch_records.locate_torch_cell("eval", "e009", "t8_2_16")
    found = json.loads(place.read_text())
    for row in found["prompts"]:
        row |= {"process_s": row["process_s"] / 2, "baseline_process_s": row["baseline_process_s"] / 2}
    place.write_text(json.dumps(found))
    report.main()
    printed, page = capsys.readouterr().out, report.PAGE_FILE.read_text()
    (told,) = [line for line in printed.splitlines() if "another process had the CPU" in line]
    assert told.endswith("computed 50% of the wall time; again: aerie rerun benchmark@eval-e009-t8_2_16")
    assert printed.splitlines().index(told) < printed.splitlines().index("")
    assert len(re.findall(r"^8_2_16 ! ", printed, re.MULTILINE)) == 1
    assert html.escape(told.removeprefix("! ")) in page and page.count('">!</span></th>') == 1
    verdict = json.loads(report.METRICS_FILE.read_text())["verdict"]
    assert verdict["kind"] == "launch" and printed.startswith(f"{verdict['text']}\n")
    assert f"<h1>{made_up.report.title}</h1>" in page and f'<p class="headline">{verdict["text"]}.</p>' in page


def test_speedups_that_are_not_clear_of_1_are_no_headline_and_no_colour(
    made_up: schema.Params, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: on a busy machine 1.74x was printed in bold colour under a headline, with an interval from 0.72 to 3.53."""
    for place in torch_records.CELLS_FOLDER.glob("*.json"):
        found = json.loads(place.read_text())
        found["metrics"] |= {"speedup": 1.74, "speedup_low": 0.72, "speedup_high": 3.53}
        place.write_text(json.dumps(found))
    report.main()
    metrics, page = json.loads(report.METRICS_FILE.read_text()), report.PAGE_FILE.read_text()
    assert metrics["verdict"]["kind"] == "noisy"
    assert all(found["best_by_speedup"] is None for found in metrics["checkpoints"].values())
    assert "none is clearly above 1" in page
    results = page[page.index('id="results"') : page.index('id="latencies"')]
    assert not re.findall(r'<td class="top">[\d.]+×', results) and "1.74× <small>(0.72-3.53)</small>" in results


def test_a_draft_that_accepts_nothing_has_a_warning_and_no_badge(
    made_up: schema.Params, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in torch_records.CELLS_FOLDER.glob("*.json"):
        found = json.loads(place.read_text())
        found["metrics"] |= {"tau": 1.0, "speedup": 0.5, "speedup_low": 0.4, "speedup_high": 0.6}
        place.write_text(json.dumps(found))
    for name in made_up.replay_trees.checkpoints:
        trees = [tree.model_copy(update={"tau": 1.0, "tau_low": 1.0}) for tree in replay_records.read_replay(name)]
        ReplayedTree.write_csv(replay_records.locate_replay(name), trees)
    report.main()
    printed, page = capsys.readouterr().out, report.PAGE_FILE.read_text()
    assert "! tau is exactly 1.00 in eval-e003-t8_1_9, " in printed
    assert "! tau of e009 is exactly 1.00 in every replayed tree: no draft token was accepted" in printed
    assert "! every measured tree is slower than plain decoding, the best at 0.50x" in printed
    assert printed.startswith("Do not speculate at concurrency 1: ")
    assert "best by replayed tau" not in page and "the best checkpoint by" not in printed
    results = page[page.index('id="results"') : page.index('id="latencies"')]
    assert 'class="top"' not in results


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
        mine = [row for row in _lines(BenchmarkRow.TABLE) if row["checkpoint"] == name]
        assert found["best_by_tau"]["tau"] == max(float(row["tau"]) for row in mine)
        assert found["best_by_speedup"]["speedup"] == max(float(row["speedup"]) for row in mine)
        assert found["best_by_speedup"]["speedup_low"] > 1


def test_the_pictures_are_of_the_measured_checkpoint_and_not_of_a_better_one_that_was_only_replayed(
    made_up: schema.Params,
) -> None:
    """Bug: the pictures were of e003, best by replayed tau, though e009 alone was measured, whose latencies were not shown."""
    text = Path("params.yaml").read_text()
    changed, count = re.subn(r"\[e003, e009\](\n  trees: \[t8_1_9,)", r"[e009]\1", text)
    assert count == 1
    Path("params.yaml").write_text(changed)
    report.main()
    assert json.loads(report.METRICS_FILE.read_text())["best_checkpoint"] == "e003"
    page = report.PAGE_FILE.read_text()
    assert "<strong>tau against verified tokens</strong>, e009, replayed." in page
    assert "<strong>Speedup of these trees</strong>, e009, measured, with" in page
    told = "Figures and pictures here are of <strong>e009</strong>, which the verdict is about; e003 was replayed, not measured."
    assert told in page and "The best checkpoint is <strong>e003</strong>" in page
    assert 'id="latencies"' in page and "Drafts accepted in a verify cycle" in page
    assert "replayed with e009: what it would" in page and ">All trees of e009<" in page


def test_a_prediction_that_measured_cells_contradict_is_told_on_the_page_and_by_launch(
    made_up: schema.Params, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: the flags of a tree that was measured as slower were printed without a word."""
    sentence = "Measured cells contradict a prediction here; what was measured goes before what was predicted"
    report.main()
    assert sentence not in report.PAGE_FILE.read_text() and sentence not in capsys.readouterr().out
    for place in Path("results/cells").glob("*.json"):
        cell = json.loads(place.read_text())
        cell["metrics"] |= {"speedup": 0.5, "speedup_low": 0.4, "speedup_high": 0.6}
        atomic.write_json(place, cell)
    report.main()
    page = report.PAGE_FILE.read_text()
    assert f"<li>{sentence}.</li>" in page and "which goes before what is predicted here" in page
    assert capsys.readouterr().out.splitlines()[1] == sentence
    report.main("--launch")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"{sentence}: Prediction and measurement disagree at concurrency 1: ")


def test_a_missing_cell_is_named_with_what_to_run(made_up: schema.Params) -> None:
    torch_records.locate_torch_cell("eval", "e009", "t8_2_16").unlink()
    with pytest.raises(
        ValueError, match=r"eval-e009-t8_2_16\.json not found; run: dvc repro benchmark@eval-e009-t8_2_16"
    ):
        report.main()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda c: c["metrics"].pop("tau_low"), "lacks .'metrics.tau_low'.; .*; run: dvc repro -f -s benchmark@"),
        (
            lambda c: c.update(definitions="docs/metrics.md, version 0"),
            "version 0, expected docs/metrics.md, version 3",
        ),
        (lambda c: c.update(tree="t5_1_6"), "holds the cell eval-e009-t5_1_6"),
    ],
)
def test_a_foreign_cell_is_refused(made_up: schema.Params, spoil: Any, message: str) -> None:
    place = torch_records.locate_torch_cell("eval", "e009", "t8_2_16")
    found = json.loads(place.read_text())
    spoil(found)
    atomic.write_json(place, found)
    with pytest.raises(ValueError, match=message):
        report.main()


def test_a_report_of_another_version_is_refused(made_up: schema.Params) -> None:
    atomic.write_json(Path("results/train/e000.json"), {"draft_vocab_size": 320})
    with pytest.raises(
        ValueError, match=r"train/e000.json lacks .'target_vocab_size'.*dvc repro -f -s init_draft@e000"
    ):
        report.main()


def test_training_from_another_checkpoint_is_refused(made_up: schema.Params) -> None:
    place = Path("results/train/e009.json")
    atomic.write_json(place, json.loads(place.read_text()) | {"from": "e000"})
    with pytest.raises(
        ValueError, match=r"e009\.json starts from e000, expected e003; run: dvc repro train_draft@e009"
    ):
        report.main()


def test_a_workload_that_never_drafts_is_no_reason_to_fail(made_up: schema.Params) -> None:
    """Answers of one token come whole from the prefill: no cycle, an empty histogram."""
    for checkpoint in made_up.benchmark.checkpoints:
        for tree in made_up.benchmark.trees:
            c = torch_records.read_torch_cell("eval", checkpoint, tree).model_dump()
            torch_records.write_torch_cell(c | {"histogram": [0] * len(c["histogram"])})
    report.main()
    assert '<div class="bars">' not in report.PAGE_FILE.read_text()


def test_cells_and_replays_that_params_do_not_list_are_ignored(made_up: schema.Params) -> None:
    stale = torch_records.read_torch_cell("eval", "e009", "t8_2_16").model_dump() | {
        "tree": "t9_2_16",
        "checkpoint": "e001",
    }
    torch_records.write_torch_cell(stale)
    Path("results/replay/e001.csv").write_text("not,a,replay\n")
    report.main()
    b = made_up.benchmark
    assert len(_lines(BenchmarkRow.TABLE)) == len(b.workloads) * len(b.checkpoints) * len(b.trees)
    for made in (BenchmarkRow.TABLE, report.REPLAY_TABLE, report.PAGE_FILE):
        assert not re.search(r"\be001\b", made.read_text())


def test_the_page_needs_nothing_from_elsewhere(made_up: schema.Params) -> None:
    report.main()
    page = report.PAGE_FILE.read_text()
    assert not re.search(ELSEWHERE, page) and page.count("<script") == 1
    assert page.count(PICTURE) == PLOTS
    assert "#0101" not in page
    for word in ("Tree_structure", "prefill_latency (s)", "spec_accept_rate (%)", "e2e_latency (s)", "compress ratio"):
        assert word in re.sub(r"<[^>]+>", "", page)


def test_the_page_is_the_same_twice(made_up: schema.Params) -> None:
    report.main()
    first = report.PAGE_FILE.read_bytes()
    made_once.forget()
    report.main()
    assert report.PAGE_FILE.read_bytes() == first


def test_what_users_wrote_is_escaped(made_up: schema.Params) -> None:
    place = Path("results/fix_report.json")
    fixed = json.loads(place.read_text())
    fixed["examples"] = {"fence": {"before": "<b>hot</b>", "after": "hot"}}
    atomic.write_json(place, fixed)
    report.main()
    assert "&lt;b&gt;hot" in report.PAGE_FILE.read_text()


def test_rows_that_do_not_add_up_are_shown(made_up: schema.Params, capsys: pytest.CaptureFixture[str]) -> None:
    atomic.write_json(Path("results/sample_report.json"), _made_up_report("sample_target") | {"rows_out": 250})
    report.main()
    assert "10 unaccounted for" in report.PAGE_FILE.read_text()
    assert json.loads(report.METRICS_FILE.read_text())["rows_unaccounted"] == 10
    assert "warning: 10 rows" in capsys.readouterr().out


def test_the_page_says_which_files_the_sampled_rows_are_from(made_up: schema.Params) -> None:
    report.main()
    page = report.PAGE_FILE.read_text()
    assert "part-19&lt;b&gt;.jsonl</td><td>11</td><td>2</td>" in page and "part-20" not in page
    assert "2 more files, in results/sample_report.json" in page and "eval.jsonl</td><td>42</td><td>0</td>" in page


def test_one_checkpoint_alone_has_no_duel(made_up: schema.Params) -> None:
    text = (
        Path("params.yaml")
        .read_text()
        .replace("    e009: {from: e003, epochs: 6}\n", "")
        .replace("[e003, e009]", "[e003]")
        .replace("[e009]", "[e003]")
    )
    Path("params.yaml").write_text(text)
    report.main()
    assert report.PAGE_FILE.read_text().count(PICTURE) == PLOTS - 1


def test_what_happens_inside_trees_is_shown_where_any_was_looked_into(made_up: schema.Params) -> None:
    report.main()
    assert "Inside some trees" not in report.PAGE_FILE.read_text()
    for name in made_up.replay_trees.checkpoints:
        buckets = made_up_inside(name, made_up.replay_trees.traced_trees())
        TreeBucket.write_csv(replay_records.locate_tree_statistics(name), buckets)
    report.main()
    page = report.PAGE_FILE.read_text()
    assert page.count(PICTURE) == PLOTS + INSIDE and "#0303" not in page
    said = re.sub(r"(\s|<[^>]+>)+", " ", page)
    assert "Inside some trees" in said and "8_1_9 (8_1_8) 60 2.33 8 2.67 1.33 0.50 33% → 33%" in said


def test_a_replay_without_its_cycles_is_named(made_up: schema.Params) -> None:
    replay_records.locate_tree_statistics("e003").unlink()
    with pytest.raises(ValueError, match=r"e003\.inside\.csv not found; run: dvc repro replay_trees@e003"):
        report.main()


# Served cells

TREES = ("t5_1_6", "t8_2_16")


def serve(workloads: Row, **benchmark: Any) -> None:
    """Ask for these workloads to be served, besides what the project has; `benchmark` changes that section."""
    edit_params(
        Path(),
        {
            "benchmark": {"workloads": {"eval": EVAL} | workloads} | benchmark,
            "benchmark_served": {"workloads": list(workloads), "checkpoints": ["e009"], "trees": list(TREES)},
        },
    )
    make_up_spent(*(f"prepare_prompts-{name}" for name in workloads))


def replayed(tree: str, checkpoint: str = "e009") -> float:
    shape = TreeShape.parse(tree)
    return next(row.tau for row in replay_records.read_replay(checkpoint) if row.shape == shape)


def make_up_served(workload: str, off: float = 1.0, **keys: Any) -> None:
    """A baseline and a chain whose tau is `off` times the replayed, each of three repeats; the other tree can't run."""
    served_records.write_served_cell(served_cell(workload, points=[point(200, 64, 0.02, repeats=3, accuracy=0.5)]))
    drafted = point(200, 64, 0.01, off * replayed("t5_1_6"), repeats=3, accuracy=0.5, warnings=["<b>hot</b>"])
    served_records.write_served_cell(served_cell(workload, "e009", "t5_1_6", [drafted]) | keys)
    served_records.write_served_cell(served_cell(workload, "e009", "t8_2_16"))


def words(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", page))


def test_without_served_workloads_nothing_of_them_is_shown(
    made_up: schema.Params, capsys: pytest.CaptureFixture[str]
) -> None:
    report.main()
    assert ServedRow.TABLE.read_text() == ",".join(ServedRow.list_keys()) + "\n"
    assert "served" not in json.loads(report.METRICS_FILE.read_text()) and "served by" not in capsys.readouterr().out
    for heading in (">Served</h2>", "When not to speculate", "Servers and their flags", "highest speedup served"):
        assert heading not in report.PAGE_FILE.read_text()


def test_served_cells_stand_beside_plain_decoding_and_replays(
    made_up: schema.Params, capsys: pytest.CaptureFixture[str]
) -> None:
    serve({"code": {**EVAL, "concurrency": 64, "repeats": 3}})
    make_up_served("code")
    report.main()
    chain, baseline_row, other = sorted(_lines(ServedRow.TABLE), key=lambda r: (r["tree"] != "t5_1_6", r["tree"]))
    assert (baseline_row["decoding"], other["status"]) == ("plain", "unsupported")
    assert chain["replay_agrees"] == "yes" and float(chain["speedup_low"]) < float(chain["speedup"])
    page = report.PAGE_FILE.read_text()
    said = words(page)
    assert f"{float(chain['speedup']):.2f}×" in said and f"{replayed('t5_1_6'):.2f} × 1.00" in said
    assert "unsupported: topk above 1 isn&#39;t built there" in said and f"{replayed('t8_2_16'):.2f}" in said
    assert 'class="off"' not in page
    for part in (
        "Memory",
        "Right answers",
        "The engine's own figures",
        "spec_accept_length",
        "Warnings",
        "launch_server",
    ):
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


@pytest.mark.parametrize("others", [{"prompts": "gsm8k"}, {"ignore_eos": True}, {"temperature": 0.7}])
def test_what_was_not_replayed_is_not_held_against_it(made_up: schema.Params, others: Row) -> None:
    serve({"code": {**EVAL, "concurrency": 64, "repeats": 3} | others})
    make_up_served("code", off=0.7, **{k: v for k, v in others.items() if k == "temperature"})
    report.main()
    assert 'class="off"' not in report.PAGE_FILE.read_text()
    assert "off_replay" in (found := json.loads(report.METRICS_FILE.read_text())["served"]) and found["off_replay"] == 0


def test_cells_of_another_fingerprint_have_a_reason_instead_of_a_speedup(made_up: schema.Params) -> None:
    serve({"code": {**EVAL, "concurrency": 64, "repeats": 3}})
    make_up_served("code", fingerprint=FINGERPRINT | {"gpu": "NVIDIA H100"})
    report.main()
    said = words(report.PAGE_FILE.read_text())
    assert "not compared: the baseline differs in gpu (NVIDIA H100 against NVIDIA H200)" in said
    assert json.loads(report.METRICS_FILE.read_text())["served"]["best_by_speedup"] is None


def test_a_sweep_says_when_not_to_speculate(made_up: schema.Params) -> None:
    serve({"sweep": {**EVAL, "max_new_tokens": [16, 64], "concurrency": [1, 16, 64], "repeats": 2}})
    served_records.write_served_cell(
        served_cell("sweep", points=sweep([16, 64], [1, 16, 64], lambda tokens, cap: 0.02, repeats=2))
    )
    pace = {1: 0.01, 16: 0.0135, 64: 0.04}
    for tree, gain in zip(TREES, (1.0, 1.2), strict=True):
        points = sweep([16, 64], [1, 16, 64], lambda tokens, cap, gain=gain: pace[cap] / gain, repeats=2, tau=2.9)
        served_records.write_served_cell(served_cell("sweep", "e009", tree, points))
    report.main()
    page = report.PAGE_FILE.read_text()
    said = words(page)
    assert (
        page.count(PICTURE) == PLOTS + 3 + 1 + 3
    )  # of each tree and of the best of both; predicted against measured; latencies
    assert "Slower than plain decoding at 2 of 6 loads (tokens × concurrency): 16 x 64, 64 x 64." in said
    at = re.search(
        r"5_1_6 \(5_1_5\) · sweep.*?Answers of 64 tokens: faster up to a concurrency of ([\d.]+), slower beyond", said
    )
    rows = {
        r["concurrency"]: float(r["speedup"])
        for r in _lines(ServedRow.TABLE)
        if (r["tree"], r["max_new_tokens"]) == ("t5_1_6", "64")
    }
    by_hand = 16 * 4 ** ((rows["16"] - 1) / (rows["16"] - rows["64"]))
    assert at and float(at[1]) == pytest.approx(by_hand, rel=0.005)
    assert 'class="slower"' in page and "#0101" not in page


def test_the_torch_engines_loads_stand_beside_served_ones(
    made_up: schema.Params, capsys: pytest.CaptureFixture[str]
) -> None:
    """One workload by both engines: a table of each, each beside its own plain decoding, and each its own break-even."""
    serve(
        {"code": {**EVAL, "concurrency": [8, 64], "repeats": 1}}, torch_workloads=["eval", "code"], checkpoints=["e009"]
    )
    served_records.write_served_cell(served_cell("code", points=[point(200, 8, 0.02), point(200, 64, 0.02)]))
    for tree in ("t5_1_6", "t8_2_16"):
        tau = replayed(tree)
        served_records.write_served_cell(
            served_cell("code", "e009", tree, [point(200, 8, 0.01, tau, tree), point(200, 64, 0.015, tau, tree)])
        )
    p = schema.load_params()
    for tree in p.benchmark.trees:
        tau = replayed(tree)
        ours = [point(200, 8, 0.01, tau, tree), point(200, 64, 0.03, tau, tree)]
        plain = [point(200, 8, 0.02), point(200, 64, 0.02)]
        found = served_cell("code", "e009", tree, ours, engine="torch", baseline_points=plain, fingerprint={})
        assert served_records.write_served_cell(found) == torch_records.locate_torch_cell("code", "e009", tree)
    report.main()
    printed = capsys.readouterr().out
    assert (
        "code, checkpoint e009, served by sglang" in printed and "code, checkpoint e009, by the torch engine" in printed
    )
    rows = [row for row in ServedRow.read_table() if row["decoding"] == "speculative" and row["workload"] == "code"]
    speedups = {(row["engine"], row["tree"], row["concurrency"]): row["speedup"] for row in rows}
    assert len(speedups) == 2 * 2 + 2 * len(p.benchmark.trees)
    assert speedups["torch", "t8_2_16", 8.0] > 1 > speedups["torch", "t8_2_16", 64.0]
    assert min(speedups["sglang", "t8_2_16", cap] for cap in (8.0, 64.0)) > 1
    assert {row["replay_agrees"] for row in rows} == {"yes"}
    page = words(report.PAGE_FILE.read_text())
    assert "8_2_16 · code, checkpoint e009, torch" in page and "8_2_16 · code, checkpoint e009, sglang" in page
    assert "Slower than plain decoding at 1 of 2 loads" in page and "Faster than plain decoding at all 2 loads" in page
    assert {row["workload"] for row in csv.DictReader(BenchmarkRow.TABLE.open())} == {"eval"}
    costs_of = {
        row["engine"] for row in json.loads(Path("results/launch.json").read_text())["costs"] if row["workload"]
    }
    assert "torch" not in costs_of  # loads of the torch engine say nothing of a server's cycles


def test_a_torch_cell_of_another_kind_is_named_with_what_to_run(made_up: schema.Params) -> None:
    """One that was written before its workload became a sweep, and the other way round."""
    edit_params(Path(), {"benchmark": {"workloads": {"eval": {**EVAL, "concurrency": [1, 8]}}}})
    with pytest.raises(ValueError, match=r"eval-e003-t8_1_9\.json lacks .*dvc repro -f -s benchmark@eval-e003-t8_1_9"):
        report.main()
    edit_params(Path(), {"benchmark": {"workloads": {"eval": EVAL}}})
    found = served_cell("eval", "e003", "t8_1_9", [point(200, 8, 0.01, 2.0, "t8_1_9")], engine="torch")
    served_records.write_served_cell(found)
    with pytest.raises(ValueError, match=r"eval-e003-t8_1_9\.json lacks .*dvc repro -f -s benchmark@eval-e003-t8_1_9"):
        report.main()


def test_without_torch_cells_the_report_shows_what_was_served(
    made_up: schema.Params, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(torch_records.CELLS_FOLDER)
    serve({"code": {**EVAL, "concurrency": 64, "repeats": 3}}, torch_workloads=[])
    make_up_served("code")
    report.main()
    assert _lines(BenchmarkRow.TABLE) == []
    printed = capsys.readouterr().out
    assert printed.startswith("Launch t5_1_6 with e009: ") and "(sglang, code, 200 tokens)" in printed.splitlines()[0]
    assert "\n\ncode, checkpoint e009, served by sglang\nTree_structure" in printed
    assert report.TABLE_FILE.read_text() == printed
    page = report.PAGE_FILE.read_text()
    assert (
        'id="served"' in page
        and ">Which tree</h2>" in page
        and ">Results</h2>" not in page
        and "verify cycle</h3>" not in page
    )
    assert json.loads(report.METRICS_FILE.read_text())["identical_share_min"] is None


@pytest.mark.usefixtures("made_up")
def test_the_table_is_kept_as_it_was_printed(capsys: pytest.CaptureFixture[str]) -> None:
    report.main()
    printed = capsys.readouterr().out
    run_command_line(["table"])
    assert capsys.readouterr().out == printed
    assert re.search(
        r"^Tree_structure +prefill_latency +spec_accept_rate +e2e_latency +compress ratio", printed, re.MULTILINE
    )
    row = next(r for r in _lines(BenchmarkRow.TABLE) if r["tree"] == "t8_1_9")
    assert re.search(rf"^8_1_9 \(8_1_8\) .* {float(row['tau']):.2f} ", printed, re.MULTILINE)
    assert "the best checkpoint by replayed tau" in printed


def test_table_without_a_report_says_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"table\.txt not found; run: aerie run"):
        run_command_line(["table"])


def test_the_advice_starts_without_the_heavy_libraries() -> None:
    code = "import sys, stages.report; print(*{'matplotlib', 'jinja2', 'polars', 'torch', 'numpy'} & set(sys.modules))"
    heavy = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert heavy.stdout.split() == []


def test_where_nothing_is_trained_the_page_has_no_curves(made_up: schema.Params) -> None:
    """Drafts that were all imported: no loss, no accuracy, and their cells and replays all the same."""
    for kind in ("e003", "e009"):
        Path(f"results/train/{kind}.json").unlink()
    for tree in made_up.benchmark.trees:
        torch_records.write_torch_cell(
            torch_records.read_torch_cell("eval", "e009", tree).model_dump() | {"checkpoint": "theirs"}
        )
    for kind in (".csv", ".inside.csv"):
        text = Path(f"results/replay/e009{kind}").read_text().replace("e009", "theirs")
        atomic.write_text(Path(f"results/replay/theirs{kind}"), text)
    whole = YAML(typ="safe").load(Path("params.yaml").read_text())
    whole["train_draft"]["checkpoints"] = {}
    whole["import_draft"]["checkpoints"] = {"theirs": {"model": "someone/theirs", "revision": None, "rope_theta": None}}
    for section in ("replay_trees", "benchmark", "benchmark_served"):
        whole[section]["checkpoints"] = ["theirs"]
    make_up_import("theirs")
    with Path("params.yaml").open("w") as file:
        YAML(typ="safe").dump(whole, file)
    report.main()
    page = Path("results/report/index.html").read_text()
    assert (
        "someone/theirs, imported" in page
        and "Loss per epoch" not in page
        and "Drafts accepted in a verify cycle" in page
    )
