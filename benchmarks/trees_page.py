"""docs/trees.md: which tree, and why, with figures of our own.   python -m benchmarks.trees_page [record DATE]

`record` replays the drafts e001, e003 and e009 of the project it is run in (after `dvc repro` with e001, one epoch from
e000, added to train_draft.checkpoints) over a wider grid than the default's, and e009 once more with its chances flattened
or sharpened; ten minutes on two cores. It keeps what came out in docs/results/DATE-trees/. Without arguments the page is
written from the last such record; tests/test_trees_page.py holds the two against each other.
"""

import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from ruamel.yaml import YAML
from safetensors.torch import load_file, save_file

from stages.formats import atomic, cell, replays
from stages.params import candidates

Row = dict[str, Any]
Shape = tuple[int, int, int]

ROOT = Path(__file__).parent.parent
PAGE, RECORDS = ROOT / "docs/trees.md", ROOT / "docs/results"
HARD, MIDDLE, EASY = "e001", "e003", "e009"
TEMPERATURES = (0.5, 1.4, 2, 3, 4)  # of e009's chances: its logits are divided by them
TWO, THREE = (10, 2, 32), (10, 3, 32)  # the seed's question
WIDE: Shape = (6, 10, 32)
TOPKS, BUDGETS = (1, 2, 3, 4, 5, 6, 8, 10), (8, 16, 24, 32, 48, 64)
GRID = {
    "steps": list(range(1, 13)), "topk": list(TOPKS), "tokens": [4, 6, *BUDGETS],
    "inside": [f"t{s}_{k}_{m}" for s, k, m in (TWO, THREE, WIDE)],
}  # fmt: skip
PAIR = {"steps": [10], "topk": [1, 2, 3], "tokens": [32], "inside": GRID["inside"][:2]}
TREES = ("draft", "steps", "topk", "tokens", "tau", "tau_low", "tau_high", "cycles", "accepted", "mean_depth")
INSIDE = ("draft", *replays.INSIDE[1:])


# Recording


def record(date: str) -> None:
    place = RECORDS / f"{date}-trees"
    place.mkdir(parents=True, exist_ok=True)
    drafts = [(name, GRID, 1.0) for name in (HARD, MIDDLE, EASY)]
    drafts += [(f"{EASY}@{temperature:g}", PAIR, temperature) for temperature in TEMPERATURES]
    trees: list[Row] = []
    inside: list[Row] = []
    for name, grid, temperature in drafts:
        print(f"{name} ...", flush=True)
        made = replayed(name.split("@")[0], grid, temperature)
        for rows, found in zip((trees, inside), made, strict=True):
            rows += [row | {"draft": name} for row in found]
    atomic.write_csv(place / "trees.csv", TREES, map(rounded, trees))
    atomic.write_csv(place / "inside.csv", INSIDE, map(rounded, inside))
    settings = YAML(typ="safe").load(Path("params.yaml").read_text())
    about = {
        "date": date,
        "model": settings["target"]["model"],
        "hardware": cell.hardware("cpu", settings["target"]["num_threads"]),
    }
    atomic.write_json(place / "about.json", about)


def replayed(checkpoint: str, grid: Row, temperature: float) -> tuple[list[Row], list[Row]]:
    """The two tables of a replay of this grid, in a project of its own beside this one's data."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for name in ("artifacts", "data"):
            (work / name).symlink_to(Path(name).resolve())
        draft = shutil.copytree(f"drafts/{checkpoint}/draft", work / f"drafts/{checkpoint}/draft")
        weights = load_file(draft / "model.safetensors")
        (draft / "model.safetensors").unlink()  # it may be a link into DVC's cache
        # The last norm feeds the head alone: the state that goes on to the next step is taken before it.
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
        return tuple(rows_of(work / place(checkpoint)) for place in (replays.path, replays.inside_path))


def rows_of(place: Path) -> list[Row]:
    with place.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def rounded(row: Row) -> Row:
    return {k: f"{float(v):.4f}" if "." in v and k in (*TREES, "promised") else v for k, v in row.items()}


# What is read of a record


class Record:
    """The tables of a record, by draft."""

    def __init__(self, place: Path) -> None:
        self.name = place.name
        self.about = json.loads((place / "about.json").read_text())
        self.trees: dict[str, dict[Shape, Row]] = {}
        for row in rows_of(place / "trees.csv"):
            shape = int(row["steps"]), int(row["topk"]), int(row["tokens"])
            numbers = {k: float(row[k]) for k in TREES[4:]}
            self.trees.setdefault(row["draft"], {})[shape] = numbers
        self.inside: dict[tuple[str, str, str], dict[str, Row]] = {}
        for row in rows_of(place / "inside.csv"):
            counts = {k: float(row[k]) for k in ("cycles", "nodes", "promised", "accepted") if row[k]}
            self.inside.setdefault((row["draft"], row["tree"], row["by"]), {})[row["bucket"]] = counts

    def buckets(self, draft: str, shape: Shape, by: str) -> dict[str, Row]:
        return self.inside[draft, name(shape), by]

    def total(self, draft: str, shape: Shape, what: str) -> float:
        return sum(row[what] for row in self.buckets(draft, shape, "row").values())

    def tau(self, draft: str, shape: Shape) -> float:
        return self.trees[draft][shape]["tau"]

    def kept(self, draft: str, shape: Shape) -> float:
        """Drafts accepted, of those promised."""
        return self.total(draft, shape, "accepted") / self.total(draft, shape, "promised")

    def difference(self, draft: str, one: Shape, other: Shape) -> tuple[float, float, float]:
        """tau of one less that of the other, with its 95% interval: the same answers are drawn for both, 2,000 times."""
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


# The page


def table(*lines: Iterable[Any]) -> str:
    head, *rows = [f"| {' | '.join(map(str, line))} |" for line in lines]
    return "\n".join([head, "|" + "---|" * head.count(" | ") + "---|", *rows])


def question(r: Record, drafts: Iterable[tuple[str, str]]) -> str:
    head = ("draft", "tau of 10_2_32", "tau of 10_3_32", "10_2_32 less 10_3_32, 95%", "depth of 10_2_32", "of 10_3_32",
            "accepted / promised, 10_3_32")  # fmt: skip
    lines = []
    for draft, called in drafts:
        less, low, high = r.difference(draft, TWO, THREE)
        depths = [f"{r.trees[draft][shape]['mean_depth']:.1f}" for shape in (TWO, THREE)]
        taus = [f"{r.tau(draft, shape):.2f}" for shape in (TWO, THREE)]
        lines.append(
            (called, *taus, f"{less:+.2f} ({low:+.2f} to {high:+.2f})", *depths, f"{r.kept(draft, THREE):.2f}")
        )
    return table(head, *lines)


def flattened(r: Record) -> list[tuple[float, str]]:
    """(temperature, draft): e009's own is 1."""
    return sorted([(1.0, EASY), *((float(d.split("@")[1]), d) for d in r.trees if d.startswith(f"{EASY}@"))])


def places(r: Record) -> str:
    head = ("tree", "candidates k + (s − 1)k²", "places", "depth reached, e001", "e009", "tau, e001", "e009")
    shapes: list[Shape] = [(8, 2, 16), TWO, (8, 3, 16), THREE, (12, 3, 32), WIDE]
    return table(
        head,
        *(
            (short(s), f"{s[1]} + {s[0] - 1}·{s[1] ** 2} = {candidates(*s[:2])}", s[2] - 1,
             *(f"{r.trees[draft][s]['mean_depth']:.1f} of {s[0]}" for draft in (HARD, EASY)),
             *(f"{r.tau(draft, s):.2f}" for draft in (HARD, EASY)))
            for s in shapes
        ),
    )  # fmt: skip


def widths(r: Record) -> str:
    """Nodes a tree has at each depth, on average."""
    deepest = max(s for s, _, _ in (TWO, THREE, WIDE))
    lines = []
    for draft in (HARD, EASY):
        for shape in (TWO, THREE, WIDE):
            at, cycles = r.buckets(draft, shape, "depth"), r.total(draft, shape, "cycles")
            counts = [at.get(str(d), {"nodes": 0})["nodes"] / cycles for d in range(1, deepest + 1)]
            lines.append((short(shape), draft, *(f"{n:.1f}" if n else "" for n in counts)))
    return table(("tree", "draft", *range(1, deepest + 1)), *lines)


def above(r: Record, draft: str, shape: Shape) -> float:
    """Share of the nodes that are no beam could hold: of rank above topk among the nodes of their depth."""
    levels = r.buckets(draft, shape, "level")
    beyond = sum(row["nodes"] for rank, row in levels.items() if int(rank) > shape[1])
    return beyond / sum(row["nodes"] for row in levels.values())


def budgets(r: Record) -> str:
    lines = []
    for draft in (HARD, MIDDLE, EASY):
        for budget in BUDGETS:
            taus = [best_tau(r, draft, topk, budget) for topk in TOPKS]
            lines.append((draft, budget, *(f"**{t:.2f}**" if t == max(taus) else f"{t:.2f}" for t in taus)))
    return table(("draft", "tokens, at most", *(f"topk {k}" for k in TOPKS)), *lines)


def best_tau(r: Record, draft: str, topk: int, budget: int) -> float:
    return max(row["tau"] for (_, k, m), row in r.trees[draft].items() if k == topk and m <= budget)


def best_topk(r: Record, draft: str, budget: int) -> int:
    return max(TOPKS, key=lambda topk: best_tau(r, draft, topk, budget))


def sibling_lines(r: Record) -> str:
    lines = []
    for shape in (TWO, THREE, WIDE):
        for draft in (HARD, EASY):
            found = r.buckets(draft, shape, "sibling")
            totals = {k: sum(row[k] for row in found.values()) for k in ("nodes", "accepted")}
            shares = []
            for first, last in ((1, 1), (2, 2), (3, 3), (4, 99)):
                some = [row for rank, row in found.items() if first <= int(rank) <= last]
                nodes, accepted = (sum(row[k] for row in some) / totals[k] for k in totals)
                shares.append(f"{100 * nodes:.0f}% → {100 * accepted:.1f}%" if some else "")
            lines.append((short(shape), draft, *shares))
    return table(("tree", "draft", "first guess", "second", "third", "later"), *lines)


RANKS = ((1, 1), (2, 3), (4, 7), (8, 15), (16, 23), (24, 31))


def rank_lines(r: Record) -> str:
    lines = []
    for shape in (TWO, THREE, WIDE):
        for draft in (HARD, EASY):
            found = r.buckets(draft, shape, "rank")
            total = sum(row["accepted"] for row in found.values())
            shares = [sum(found[str(n)]["accepted"] for n in range(low, high + 1)) / total for low, high in RANKS]
            lines.append((short(shape), draft, *(f"{100 * share:.1f}%" for share in shares)))
    return table(("tree", "draft", *(f"{a}" if a == b else f"{a}–{b}" for a, b in RANKS)), *lines)


def chance_lines(r: Record, drafts: Iterable[str]) -> str:
    """Of nodes of a chance: how many there are, their mean chance and the share that was accepted."""
    drafts = list(drafts)
    found = [r.buckets(draft, THREE, "chance") for draft in drafts]
    lines = []
    for bucket in sorted({b for of in found for b in of}, key=lambda b: float(b.split("-")[0])):
        cells: list[str] = []
        for of in found:
            row = of.get(bucket, {"nodes": 0})
            promised, kept = (100 * row[k] / row["nodes"] if row["nodes"] else 0 for k in ("promised", "accepted"))
            cells.append(f"{row['nodes']:.0f}: {promised:.3g}% → {kept:.3g}%" if row["nodes"] else "")
        lines.append((bucket.replace("-", " to "), *cells))
    return table(("chance", *drafts), *lines)


def sums(r: Record, draft: str, shape: Shape) -> tuple[float, float]:
    """Drafts promised and accepted in a cycle."""
    cycles = r.total(draft, shape, "cycles")
    return r.total(draft, shape, "promised") / cycles, r.total(draft, shape, "accepted") / cycles


if __name__ == "__main__":
    if sys.argv[1:2] == ["record"]:
        record(sys.argv[2])
    else:
        from benchmarks.trees_text import page

        PAGE.write_text(page(Record(last_record())), encoding="utf-8")
