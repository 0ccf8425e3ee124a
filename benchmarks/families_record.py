"""The figures of benchmarks/families.py: read from a project's results, and kept in one CSV file.

A figure is a measure of one draft: of which seed and rate, over which answers, with which tree, at how many prompts at once.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from stages.data import conversations
from stages.params.section import ROOT_CHECKPOINT
from stages.params.tree_shape import TreeShape
from stages.results import (
    clusters,
    interval,
    prediction,
    replay_records,
    served_records,
    served_table,
    timing_grid,
    torch_records,
    training_records,
)
from stages.results.record import Record
from stages.results.replay_records import ReplayedTree, TreeBucket
from stages.results.timing_grid import TimingGrid
from stages.target import manifest
from stages.telemetry import stage_log
from stages.trees import accept_length

LENGTH_EDGES = (75, 100)  # tokens of an answer: tables of two days, of three, of four to six
LENGTH_GROUPS = ("below 75 tokens", "75 to 99 tokens", "100 tokens and more")
TURN_GROUPS = ("first answer", "follow-up")
TOKEN_BUDGETS = (16, 32)
NAMED_TREES = ("t1_1_2", "t3_1_4", "t7_1_8", "t5_4_16", "t8_2_16", "t7_4_16")  # kept beside a draft's own
ALL = "all"  # answers at temperature 0
UNIT_PATTERN = re.compile(r"\b(?:in|unit|Use) ([CF])\b")


class FamilyFigure(Record):
    """One number of one draft."""

    target: str
    family: str
    seed: int
    rate: float
    measure: str
    group: str = ALL
    tree: str | None = None
    at_once: int | None = None
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class ComparedDraft:
    """A checkpoint of the comparison, which trains every draft from the root checkpoint."""

    family: str
    seed: int
    rate: float
    checkpoint: str
    chain: str
    cells: tuple[str, ...]


def make_figure(
    target: str, family: str, seed: int, rate: float, measure: str, value: float, **more: Any
) -> FamilyFigure:
    """Return a figure of six significant digits."""
    short = {name: float(f"{number:.6g}") for name, number in more.items() if isinstance(number, float)}
    value = float(f"{value:.6g}")
    return FamilyFigure(
        target=target, family=family, seed=seed, rate=rate, measure=measure, value=value, **more | short
    )


def locate_record(home: Path, date: str) -> Path:
    return home / "docs/results" / f"{date}-families.csv"


def write_figures(path: Path, figures: Sequence[FamilyFigure]) -> None:
    """Write the figures of some targets; those of others that the file has stay, before them."""
    targets = {figure.target for figure in figures}
    others = FamilyFigure.read_csv(path, "families") if path.exists() else []
    FamilyFigure.write_csv(path, [*(figure for figure in others if figure.target not in targets), *figures])


def read_figures(
    target: str, drafts: Sequence[ComparedDraft], timed: Mapping[str, str], epochs: Mapping[str, int]
) -> Iterator[FamilyFigure]:
    """Yield the figures of all drafts of the project in the current folder.

    `timed` names the checkpoint of each family whose cycles were timed; cells were measured on the first draft of each.
    """
    model = manifest.read_manifest().model
    groups = group_answers()
    grids = {family: timing_grid.read_timing_grid(checkpoint, model) for family, checkpoint in timed.items()}
    measured: set[str] = set()
    for draft in drafts:
        given = target, draft.family, draft.seed, draft.rate
        trees = replay_records.read_replay(draft.checkpoint)
        found = [
            *list_training_values(draft, epochs[draft.family]),
            *list_tau_values(trees),
            *list_group_values(replay_records.read_tree_statistics(draft.checkpoint), groups),
            *list_predicted_values(grids[draft.family], draft.checkpoint, trees),
        ]
        if draft.family not in measured:
            measured.add(draft.family)
            found += [*list_cycle_values(grids[draft.family]), *list_cell_values(draft)]
        named = {draft.chain, *draft.cells, *NAMED_TREES}
        for measure, value, more in found:
            if measure.startswith("best_") or more.get("tree") in (None, *named):
                yield make_figure(*given, measure, value, **more)


Value = tuple[str, float, dict[str, Any]]  # measure, value, and the other columns


# Training and size


def list_training_values(draft: ComparedDraft, epochs: int) -> Iterator[Value]:
    """Yield a checkpoint's epochs, time, tokens and size."""
    report = training_records.read_training(draft.checkpoint, ROOT_CHECKPOINT)
    yield "epochs", epochs, {}
    yield "training_seconds", report.seconds, {}
    yield "training_tokens", sum(epoch.tokens for epoch in report.epochs), {}
    if process_s := find_process_seconds(draft.checkpoint):
        yield "training_process_s", process_s, {}
    yield "parameters", count_parameters(Path(f"drafts/{draft.checkpoint}/draft")), {}


def find_process_seconds(checkpoint: str) -> float | None:
    """Return the CPU time of the process that trained a checkpoint; None where the log has none."""
    runs = [run for run in stage_log.read_log() if run.stage == f"train_draft@{checkpoint}"]
    return runs[-1].process_s if runs else None


def count_parameters(folder: Path) -> int:
    """Return the number of a draft's weights; the integers of its vocabulary are none."""
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "np") as tensors:
            for name in tensors.keys():  # noqa: SIM118, it is no dict
                part = tensors.get_slice(name)
                total += int(np.prod(part.get_shape())) if part.get_dtype().startswith(("F", "BF")) else 0
    return total


# tau


def list_tau_values(trees: Iterable[ReplayedTree]) -> Iterator[Value]:
    """Yield tau of every tree at each temperature, and of the best within each budget of tokens."""
    rows = list(trees)
    for temperature in dict.fromkeys(tree.temperature for tree in rows):
        here, group = replay_records.select_temperature(rows, temperature), name_temperature(temperature)
        for tree in here:
            yield "tau", tree.tau, {"group": group, "tree": tree.shape.name, **_ends(tree.tau_low, tree.tau_high)}
        for budget in TOKEN_BUDGETS:
            best = max((tree for tree in here if tree.num_draft_tokens <= budget), key=lambda tree: tree.tau)
            more = {"group": group, "tree": best.shape.name, **_ends(best.tau_low, best.tau_high)}
            yield f"best_tau_{budget}", best.tau, more


def name_temperature(temperature: float) -> str:
    return f"temperature {temperature:g}" if temperature else ALL


def _ends(low: float | None, high: float | None) -> dict[str, float | None]:
    return {"low": low, "high": high}


def group_answers() -> dict[str, list[str]]:
    """Return the groups of every answer of the eval split, by its id."""
    sampled = conversations.read_table(Path("data/sampled/eval"), conversations.SAMPLED_SCHEMA, "sample_target")
    fixed = conversations.read_table(Path("data/fixed/eval.parquet"), conversations.FIXED_SCHEMA, "fix_data")
    asked = {
        row["id"]: next(message["content"] for message in row["messages"] if message["role"] == "user")
        for row in fixed.iter_rows(named=True)
    }
    return {
        row["id"]: name_groups(row["id"], len(row["answer_ids"]), asked[clusters.get_conversation(row["id"])])
        for row in sampled.iter_rows(named=True)
    }


def name_groups(row_id: str, num_tokens: int, question: str) -> list[str]:
    """Return the groups of an answer: its length, whether it is the first of its conversation, and the unit asked for."""
    low, high = LENGTH_EDGES
    length = LENGTH_GROUPS[(num_tokens >= low) + (num_tokens >= high)]
    unit = UNIT_PATTERN.search(question)
    turn = TURN_GROUPS[not row_id.endswith(".0")]
    return [length, turn, f"unit {unit[1]}" if unit else "no unit"]


def list_group_values(buckets: Sequence[TreeBucket], groups: Mapping[str, Sequence[str]]) -> Iterator[Value]:
    """Yield tau of each traced tree by group of answers, and the accepted share of each class of tokens."""
    for tree in dict.fromkeys(bucket.tree for bucket in buckets):
        steps = TreeShape.parse(tree).num_steps
        of_tree = [bucket for bucket in buckets if bucket.tree == tree]
        rows = {bucket.bucket: bucket for bucket in of_tree if bucket.by == "row"}
        for group in dict.fromkeys(group for row in rows for group in groups[row]):
            value, ends = pool_tau([row for name, row in rows.items() if group in groups[name]], steps)
            yield "tau", value, {"group": group, "tree": tree, **ends}
        for bucket in of_tree:
            if bucket.by == "token" and bucket.cycles is not None:
                # Of the tokens of a class, which are drafts accepted or bonuses, one a cycle.
                share = bucket.accepted / max(1, bucket.accepted + bucket.cycles)
                yield "accepted_share", share, {"group": bucket.bucket, "tree": tree}


def pool_tau(rows: Sequence[TreeBucket], num_steps: int) -> tuple[float, dict[str, float | None]]:
    """Return tau of some answers together, and its interval over conversations as columns."""
    accepted, cycles = (np.array([row[name] for row in rows]) for name in ("accepted", "cycles"))
    names = [clusters.get_conversation(row.bucket) for row in rows]
    sums = clusters.sum_by_cluster(names, accepted), clusters.sum_by_cluster(names, cycles)
    found = interval.compute_tau_interval(*sums, num_steps)
    return accept_length.compute_tau(accepted, cycles), _ends(*(found or (None, None)))


# Cost and speed


def list_cycle_values(grid: TimingGrid) -> Iterator[Value]:
    """Yield the times of plain steps and cycles, and how many plain steps a cycle takes."""
    steps = {plain.batch: plain for plain in grid.plain}
    for plain in grid.plain:
        yield "plain_step_s", plain.step_s, {"at_once": plain.batch}
    for cycle in grid.grid:
        settings = {"tree": cycle.shape.name, "at_once": cycle.batch}
        yield "cycle_s", cycle.cycle_s, settings
        yield "cycle_in_plain_steps", cycle.cycle_s / steps[cycle.batch].step_s, settings
    yield "fit_error", grid.fit.error, {}


def list_predicted_values(grid: TimingGrid, checkpoint: str, trees: Sequence[ReplayedTree]) -> Iterator[Value]:
    """Yield the predicted speedup of every tree, and of the best, at each temperature and number of prompts at once."""
    for temperature in dict.fromkeys(tree.temperature for tree in trees):
        found = prediction.predict_speedups(grid, checkpoint, temperature, trees)
        for row in found:
            yield "predicted_speedup", row.speedup, _get_prediction_settings(row)
        for at_once in dict.fromkeys(row.concurrency for row in found):
            best = max((row for row in found if row.concurrency == at_once), key=lambda row: row.speedup)
            yield "best_predicted_speedup", best.speedup, _get_prediction_settings(best)


def _get_prediction_settings(row: prediction.PredictedSpeedup) -> dict[str, Any]:
    group = name_temperature(row.temperature)
    return {"group": group, "tree": row.shape.name, "at_once": row.concurrency, **_ends(row.low, row.high)}


def list_cell_values(draft: ComparedDraft) -> Iterator[Value]:
    """Yield tau, speedup and the share of identical answers of the cells of a draft."""
    for tree in draft.cells:
        cell = torch_records.read_torch_cell("one", draft.checkpoint, tree)
        m, settings = cell.metrics, {"tree": tree, "at_once": 1}
        yield "measured_tau", m.tau, {**settings, **_ends(m.tau_low, m.tau_high)}
        yield "measured_speedup", m.speedup, {**settings, **_ends(m.speedup_low, m.speedup_high)}
        if m.identical_share is not None:
            yield "identical_share", m.identical_share, settings
        if cell.process_speedup is not None:
            yield "process_speedup", cell.process_speedup, settings
        loads = served_records.read_served_cell("many", draft.checkpoint, tree, served_records.TORCH_ENGINE)
        for line in served_table.join_lines([loads], {}, ()):
            row = line.row
            if row.decoding == served_table.SPECULATIVE and row.speedup is not None and row.tau is not None:
                settings = {"tree": tree, "at_once": row.concurrency}
                yield "measured_tau", row.tau, {**settings, **_ends(row.tau_low, row.tau_high)}
                yield "measured_speedup", row.speedup, {**settings, **_ends(row.speedup_low, row.speedup_high)}
                if row.identical_share is not None:
                    yield "identical_share", row.identical_share, settings
