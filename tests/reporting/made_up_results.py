"""A project whose results are made up, for the tests of report: cells, replays, stage reports and served cells."""

import csv
import json
import math
import random
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from stages import report
from stages.cells import timing_grid
from stages.cells.cell import Cell
from stages.cells.replay_records import GroupTau, ReplayedTree, TreeBucket
from stages.params import schema
from stages.params.section import ROOT_CHECKPOINT
from stages.params.tree_shape import TreeShape
from stages.runtime import atomic
from stages.telemetry import stage_log
from tests import costs, made_once
from tests.conftest import EVAL, ROOT, edit_params
from tests.served_cells import made_up as served_cell
from tests.served_cells import point, replayed_tree
from tests.torch_cells import timed_cell

Row = dict[str, Any]
SPENT = [
    "fix_data", "prepare_target", "sample_target", "extract_hiddens", "init_draft@e000", "check_overfit@e000", "train_draft@e003",
    "train_draft@e009", "replay_trees@e003", "replay_trees@e009", "time_cycles@torch-e000", "prepare_prompts@eval",
]  # fmt: skip
PLOTS = 7 + 3  # the last three of latencies
PICTURE = '<svg role="img"'  # each has a second one over it, of its points
ELSEWHERE = r"https?:|//[a-z]|<link|<img|@import|url\((?!#)|\bsrc=|\b(fetch|import)\("  # what a page loads from
TRACED = [TreeShape(8, 1, 9), TreeShape(10, 2, 32)]
INSIDE = 4  # more, of what happens inside trees, where any was looked into
TREES = ("t5_1_6", "t8_2_16")


def made_up_project(folder: Path, monkeypatch: pytest.MonkeyPatch) -> schema.Params:
    """A project whose results are made up; we stand in it from now on.

    It has the repository's own params.yaml, but for cells of every checkpoint.
    """
    monkeypatch.chdir(folder)
    made_once.make_once(monkeypatch)
    text = (ROOT / "params.yaml").read_text()
    text, found = re.subn(r"\[e009\](\n  trees: \[t8_1_9,)", r"[e003, e009]\1", text)
    assert found == 1, "benchmark.checkpoints is no longer [e009]"
    Path("params.yaml").write_text(text)
    p = schema.load_params()
    make_up_results(p)
    return p


def make_up_results(p: schema.Params) -> None:
    """Cells, replays and stage reports that could be true: accept lengths fall off with depth, epochs help or hurt."""
    cells_rng, rng = random.Random(4), random.Random(1)
    skill = {name: 0.80 - 0.03 * i for i, name in enumerate(p.train_draft.checkpoints)}
    for workload in p.benchmark.torch_workloads:
        for checkpoint in p.benchmark.checkpoints:
            for name in p.benchmark.trees:
                _make_up_cell(cells_rng, workload, checkpoint, TreeShape.parse(name), skill[checkpoint]).write()
    for checkpoint, segment in p.train_draft.checkpoints.items():
        rows = []
        for tree in p.replay_trees.list_trees():
            tau = _tau(skill[checkpoint], tree) + rng.uniform(-0.15, 0.15)
            counts = {"accepted": round(900 * (tau - 1)), "acceptance": " ".join(["0.8"] * tree.num_steps)}
            counts |= {"accept_rate": (tau - 1) / tree.num_steps, "mean_depth": tree.num_steps - 0.5, "tau_oracle": tau}
            rows.append(replayed_tree(tree.name, tau, tau - 0.1, tau + 0.1, checkpoint=checkpoint, **counts))
        ReplayedTree.write_csv(ReplayedTree.locate(checkpoint), rows)
        TreeBucket.write_csv(TreeBucket.locate(checkpoint), [])
        GroupTau.write_csv(GroupTau.locate(checkpoint), [])
        epochs = [
            {
                "epoch": e,
                "loss": 9 * 0.8 ** (e + 3 * (segment.from_ != ROOT_CHECKPOINT)),
                "step_loss": [1.0] * 7,
                "step_accuracy": [skill[checkpoint] * 0.94**k for k in range(7)],
                "tokens": 4000,
                "seconds": 2.5,
                "held_out": {
                    "loss": 9.0,
                    "accuracy": 0.5,
                    "accept_length": 1 + skill[checkpoint] * e / 9,
                    "answers": 40,
                },
            }
            for e in range(1, segment.epochs + 1)
        ]
        done = {
            "checkpoint": checkpoint, "from": segment.from_, "epochs": epochs, "seconds": 12.5, "weights": "ab" * 32,
        }  # fmt: skip
        atomic.write_json(Path(f"results/train/{checkpoint}.json"), done)
    timing_grid.write_grids([costs.made_up(model=p.target.model)])
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


def made_up_inside(checkpoint: str) -> list[TreeBucket]:
    """Buckets that could be true: 60 cycles a tree, half of the expected drafts are accepted."""
    buckets = {
        "row": ("q1.0", "q2.0"), "context": ("64-96", "96-128"), "answer": ("0-8", "8-12"), "after": ("digits", "letters"),
        "token": ("digits", "structure"), "sibling": ("1", "2", "3"), "path_probability": ("0.01-0.02", "0.9-1"),
    }  # fmt: skip
    return [
        TreeBucket(
            checkpoint=checkpoint,
            tree=tree.name,
            by=what,
            bucket=bucket,
            expected_accepted=80.0,
            accepted=40,
            cycles=None if what in ("sibling", "path_probability") else 30,
            nodes=30 * (tree.num_draft_tokens - 1),
        )
        for tree in TRACED
        for what, names in buckets.items()
        for bucket in names
    ]


def _make_up_cell(rng: random.Random, workload: str, checkpoint: str, tree: TreeShape, skill: float) -> Cell:
    tau = _tau(skill, tree) + rng.uniform(-0.1, 0.1)
    speedup = tau / (1.18 + 0.06 * tree.num_steps + 0.01 * tree.num_draft_tokens)
    shares = [math.exp(-(((i - tau + 1) / (0.3 * tree.num_steps)) ** 2)) for i in range(tree.num_steps + 1)]
    return timed_cell(
        tree.name,
        speedup,
        speedup * 0.95,
        speedup * 1.04,
        workload=workload,
        checkpoint=checkpoint,
        prefill_s=0.021 + rng.random() / 1000,
        step_s=0.0048,
        tau=tau,
        prompts=12,
        tokens=121,
        cycles=0,  # so that no prediction is compared
        histogram=[round(360 * s / sum(shares)) for s in shares],
        hardware={"cpu": "Made-up CPU, 2 cores", "system": "Linux", "python": "3.11.9"},
        versions={"torch": "2.13.0", "transformers": "5.23.0"},
    )


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
            "formats": {"sharegpt": 290, "prompt_answer": 10},
            "hub": {"talk.hub.yaml": {"dataset": "someone/talk", "split": "train", "commit": "8049631c", "rows": 10}},
            "examples": {
                "fence": {"origin": "a.csv, row 7", "before": f"Here it is:\n```toon\n{fixed}\n```", "after": fixed},
                "row_count": {"origin": "b.jsonl, row 0", "before": fixed.replace("[2]", "[3]"), "after": fixed},
            },
        },
        "sample_target": {
            "rows_in": 280, "rows_out": 260, "dropped": {"not asked for": 20}, "seconds": 21.0, "tokens": 31000,
            "sources": {
                "train": {f"part-{n}<b>.jsonl": {"asked": 11, "not_asked": 2} for n in range(22)},
                "eval": {"eval.jsonl": {"asked": 42, "not_asked": 0}},
            },
            "preview": [
                {"id": "q7.0", "origin": "part-3<b>.jsonl, row 8",
                 "prompt": "<|im_start|>user\nIs 2 < 3 & <b>so</b>?<|im_end|>\n", "answer": "<i>yes</i>\n</mark>",
                 "prompt_tokens": 9, "answer_tokens": 3, "finish_reason": "stop"},
            ],
        },
        "extract_hiddens": {"rows_in": 260, "rows_out": 258, "dropped": {"longer than max_length": 2}, "seconds": 4.0},
        "init_draft@e000": {"draft_vocab_size": 320, "target_vocab_size": 512, "coverage_train": 0.9991, "coverage_eval": 0.9985},
        "check_overfit@e000": {
            "tau": 7.6, "min_tau": 6.0, "required_tau": 5.71, "steps": 120, "losses": [5.0, 0.2], "seconds": 6.0,
        },
    }[stage]  # fmt: skip


def _lines(path: Path) -> list[Row]:
    with path.open(newline="") as lines:
        return list(csv.DictReader(lines))


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
    return next(row.tau for row in ReplayedTree.read(checkpoint) if row.shape == shape)


def make_up_served(workload: str, off: float = 1.0, **keys: Any) -> None:
    """A baseline and a chain whose tau is `off` times the replayed, each of three repeats; the other tree can't run."""
    write_cell(served_cell(workload, points=[point(200, 64, 0.02, repeats=3, accuracy=0.5)]))
    drafted = point(200, 64, 0.01, off * replayed("t5_1_6"), repeats=3, accuracy=0.5, warnings=["<b>hot</b>"])
    write_cell(served_cell(workload, "e009", "t5_1_6", [drafted]) | keys)
    write_cell(served_cell(workload, "e009", "t8_2_16"))


def write_cell(made: Row) -> Path:
    return Cell.model_validate(made).write()


def words(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", page))
