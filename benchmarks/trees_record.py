"""Record what docs/trees.md is written from: replays of drafts from hard to easy.   python -m benchmarks.trees_record 2026-11-21

Run it in a project after `dvc repro`, with e001 (one epoch from e000) added to train_draft.checkpoints. It replays e001,
e003 and e009 over a wider grid than the default's, and e009 once more with its probabilities flattened or sharpened: ten
minutes on two quiet cores. The record is kept in docs/results/DATE-trees/; `python -m benchmarks.trees_page` writes the page.
"""

import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from ruamel.yaml import YAML
from safetensors.torch import load_file, save_file

from stages.results import replay_records, torch_records
from stages.runtime import atomic

Row = dict[str, Any]
Shape = tuple[int, int, int]

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "docs/results"
HARD, MIDDLE, EASY = "e001", "e003", "e009"
TEMPERATURES = (0.5, 1.4, 2, 3, 4)  # e009's logits are divided by them
TWO, THREE = (10, 2, 32), (10, 3, 32)  # the pair of published/qwen3-vl-weather.yaml
WIDE: Shape = (6, 10, 32)
TOPKS, BUDGETS = (1, 2, 3, 4, 5, 6, 8, 10), (8, 16, 24, 32, 48, 64)
GRID: dict[str, list[Any]] = {
    "num_steps": list(range(1, 13)), "topk": list(TOPKS), "num_draft_tokens": [4, 6, *BUDGETS],
    "trace_trees": [f"t{s}_{k}_{m}" for s, k, m in (TWO, THREE, WIDE)],
}  # fmt: skip
PAIR = {"num_steps": [10], "topk": [1, 2, 3], "num_draft_tokens": [32], "trace_trees": GRID["trace_trees"][:2]}
TREES = (
    "draft",
    "num_steps",
    "topk",
    "num_draft_tokens",
    "tau",
    "tau_low",
    "tau_high",
    "cycles",
    "accepted",
    "mean_depth",
)
INSIDE = ("draft", *replay_records.TreeBucket.list_keys()[1:])


# Recording


def record(date: str) -> None:
    folder = RECORDS / f"{date}-trees"
    folder.mkdir(parents=True, exist_ok=True)
    drafts = [(name, GRID, 1.0) for name in (HARD, MIDDLE, EASY)]
    drafts += [(f"{EASY}@{temperature:g}", PAIR, temperature) for temperature in TEMPERATURES]
    trees: list[Row] = []
    inside: list[Row] = []
    for name, grid, temperature in drafts:
        print(f"{name} ...", flush=True)
        made = replayed(name.split("@")[0], grid, temperature)
        for rows, found in zip((trees, inside), made, strict=True):
            rows += [row | {"draft": name} for row in found]
    atomic.write_csv(folder / "trees.csv", TREES, map(rounded, trees))
    atomic.write_csv(folder / "inside.csv", INSIDE, map(rounded, inside))
    settings = YAML(typ="safe").load(Path("params.yaml").read_text())
    about = {
        "date": date,
        "model": settings["target"]["model"],
        "hardware": torch_records.describe_hardware("cpu", settings["target"]["num_threads"]),
    }
    atomic.write_json(folder / "about.json", about)


def replayed(checkpoint: str, grid: Row, temperature: float) -> tuple[list[Row], list[Row]]:
    """Return the two tables of a replay of this grid, made in a temporary project that links this one's data."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for name in ("artifacts", "data"):
            (work / name).symlink_to(Path(name).resolve())
        draft = shutil.copytree(f"drafts/{checkpoint}/draft", work / f"drafts/{checkpoint}/draft")
        weights = load_file(draft / "model.safetensors")
        (draft / "model.safetensors").unlink()  # it may be a link into DVC's cache
        # The final norm feeds the head alone; the state for the next step is taken before it.
        save_file(weights | {"norm.weight": weights["norm.weight"] / temperature}, draft / "model.safetensors")
        yaml = YAML()
        settings = yaml.load(Path("params.yaml").read_text())
        settings["replay_trees"].update(grid)
        with (work / "params.yaml").open("w") as file:
            yaml.dump(settings, file)
        command = [sys.executable, "-m", "stages.replay_trees", checkpoint]
        done = subprocess.run(
            command, cwd=work, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        trees, inside = replay_records.locate_replay, replay_records.locate_tree_statistics
        return rows_of(work / trees(checkpoint)), rows_of(work / inside(checkpoint))


def rows_of(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def rounded(row: Row) -> Row:
    return {k: f"{float(v):.4f}" if "." in v and k in (*TREES[4:], "expected_accepted") else v for k, v in row.items()}


# Reading


class Record:
    """The tables of a record, by draft."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.about = json.loads((folder / "about.json").read_text())
        self.trees: dict[str, dict[Shape, Row]] = {}
        for row in rows_of(folder / "trees.csv"):
            shape = int(row["num_steps"]), int(row["topk"]), int(row["num_draft_tokens"])
            numbers = {k: float(row[k]) for k in TREES[4:]}
            self.trees.setdefault(row["draft"], {})[shape] = numbers
        self.inside: dict[tuple[str, str, str], dict[str, Row]] = {}
        for row in rows_of(folder / "inside.csv"):
            counts = {k: float(row[k]) for k in ("cycles", "nodes", "expected_accepted", "accepted") if row[k]}
            self.inside.setdefault((row["draft"], row["tree"], row["by"]), {})[row["bucket"]] = counts

    def buckets(self, draft: str, shape: Shape, by: str) -> dict[str, Row]:
        return self.inside[draft, name(shape), by]

    def total(self, draft: str, shape: Shape, what: str) -> float:
        return sum(row[what] for row in self.buckets(draft, shape, "row").values())

    def tau(self, draft: str, shape: Shape) -> float:
        return self.trees[draft][shape]["tau"]

    def kept(self, draft: str, shape: Shape) -> float:
        """Return accepted drafts over expected ones."""
        return self.total(draft, shape, "accepted") / self.total(draft, shape, "expected_accepted")

    def difference(self, draft: str, one: Shape, other: Shape) -> tuple[float, float, float]:
        """Return tau of one less that of the other, with its 95% bootstrap interval over answers: 2,000 paired samples."""
        rows = [self.buckets(draft, shape, "row") for shape in (one, other)]
        answers = sorted(rows[0])
        counts = np.array([[[of[a]["cycles"], of[a]["accepted"]] for a in answers] for of in rows])  # [2, answers, 2]
        draws = np.random.default_rng(0).multinomial(len(answers), np.full(len(answers), 1 / len(answers)), size=2000)
        drawn = np.einsum("sa,tac->tsc", draws, counts)  # [2, samples, 2]
        taus = 1 + drawn[..., 1] / drawn[..., 0]
        low, high = np.quantile(taus[0] - taus[1], [0.025, 0.975])
        whole = 1 + counts[..., 1].sum(1) / counts[..., 0].sum(1)
        return float(whole[0] - whole[1]), float(low), float(high)


def name(shape: Shape) -> str:
    return "t{}_{}_{}".format(*shape)


def short(shape: Shape) -> str:
    return name(shape)[1:]


def last_record() -> Path:
    return max(RECORDS.glob("*-trees"))


if __name__ == "__main__":
    record(sys.argv[1])
