"""Cycles and accepted drafts of served cells beside replay's, answer by answer.

    python -m benchmarks.counts_by_row PROJECT [--checkpoint e009] [--workload eval]

PROJECT has hidden states of its eval split, the draft, and served cells of the workload, whose prompts are the first of the eval
split, at temperature 0. For each cell: answers of the stored length, and of these how many have replay's cycles and accepted
drafts, or counts at most one apart. An answer that the engine writes otherwise than sample_target's server did is another answer,
and left out by its length; sums are over the others. Cells of a GPU are compared on a machine without one too.
"""

import argparse
import csv
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from stages import replay_trees
from stages.params import schema
from stages.params.tree_shape import TreeShape
from stages.results import served_records
from stages.target import manifest
from stages.target.feature_layers import locate_feature_layers


@dataclass(frozen=True)
class RowCounts:
    """Counts of one answer."""

    tokens: int
    cycles: int
    accepted: int

    def is_near(self, other: "RowCounts", most: int) -> bool:
        return abs(self.cycles - other.cycles) <= most and abs(self.accepted - other.accepted) <= most


def replay_by_row(p: schema.Params, name: str, trees: list[TreeShape]) -> dict[TreeShape, dict[str, RowCounts]]:
    """Return replay's counts of every eval answer, by tree and id."""
    made = manifest.read_manifest()
    replayed = replay_trees._load_replayed_draft(p, name, made)
    layer_indices = locate_feature_layers(made.feature_layers, replayed.feature_layers, f"the draft of {name}")
    rows = replay_trees._open_answers(p, "eval", made, layer_indices).read_rows(replayed.dtype)
    found = replay_trees._replay_rows(replayed, rows, trees, p.replay_trees, None)
    return {
        tree: {
            row.id: RowCounts(len(row.ids) - row.prompt_length, int(found.cycles[r, g]), int(found.accepted[r, g]))
            for r, row in enumerate(rows)
        }
        for g, tree in enumerate(trees)
    }


def main(name: str, workload: str) -> None:
    p = schema.load_params()
    if not torch.cuda.is_available():
        p = p.model_copy(update={"target": p.target.model_copy(update={"device": "cpu"})})
    files = ((tree, served_records.locate_served_cell(workload, name, tree)) for tree in p.benchmark_served.trees)
    cells = [served_records.read_served_cell(workload, name, tree) for tree, file in files if file.exists()]
    if not (cells := [cell for cell in cells if cell.points]):
        sys.exit(f"no served cell of {workload} and {name} that has run; run: dvc repro benchmark_served")
    shapes = [TreeShape.parse(cell.tree or "") for cell in cells]
    replayed = replay_by_row(p, name, shapes)
    table = csv.writer(sys.stdout)
    table.writerow(
        [
            "tree",
            "answers",
            "same_length",
            "equal",
            "one_apart",
            "cycles",
            "replayed",
            "accepted",
            "replayed",
            "tau",
            "replayed",
        ]
    )
    for cell, shape in zip(cells, shapes, strict=True):
        requests = [r for point in cell.points for r in point.requests if r.repeat == 0 and not r.failed]
        pairs = [(RowCounts(r.output_tokens, r.cycles or 0, r.accepted or 0), replayed[shape][r.id]) for r in requests]
        same = [(served, replay) for served, replay in pairs if served.tokens == replay.tokens]
        near = [sum(served.is_near(replay, most) for served, replay in same) for most in (0, 1)]
        cycles, accepted = (
            [sum(getattr(pair[i], key) for pair in same) for i in (0, 1)] for key in ("cycles", "accepted")
        )
        taus = [f"{1 + a / c:.4f}" if c else "" for a, c in zip(accepted, cycles, strict=True)]
        table.writerow([shape.name, len(pairs), len(same), *near, *cycles, *accepted, *taus])


if __name__ == "__main__":
    takes = argparse.ArgumentParser()
    takes.add_argument("project", type=Path)
    takes.add_argument("--checkpoint", default="e009")
    takes.add_argument("--workload", default="eval")
    o = takes.parse_args()
    os.chdir(o.project)
    main(o.checkpoint, o.workload)
