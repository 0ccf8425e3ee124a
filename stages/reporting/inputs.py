"""Everything that the report shows, as stages/report.py read it."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from stages.cells.cell import Cell
from stages.cells.prediction import LaunchAdvice
from stages.cells.replay_records import ReplayedTree, TreeBucket
from stages.cells.table import ResultRow, TableLine
from stages.cells.training_records import DraftReport, TrainingReport
from stages.engines import versions
from stages.params import engines
from stages.reporting.costs import CostPrediction
from stages.reporting.families import Families
from stages.reporting.text import format_interval, format_tree
from stages.reporting.verdict import Verdict
from stages.telemetry.stage_log import StageRun

StageReport = dict[str, Any]  # the JSON that a stage reports of itself; the page shows every value
FLOW_STAGES = ("fix_data", "sample_target", "extract_hiddens")


@dataclass(frozen=True)
class ReportSettings:
    """The values of params.yaml that the page shows."""

    title: str
    model: str
    benchmark_trees: list[str]
    other_methods: set[str]  # checkpoints of other methods than EAGLE-3: no curve of theirs is drawn
    imported: dict[str, dict[str, Any]]  # checkpoint -> its section of import_draft
    params_digest: str  # sha256 of the parameters' values


@dataclass(frozen=True)
class StageRowCounts:
    """Rows of data into and out of one stage."""

    stage: str
    rows_in: int
    rows_out: int
    dropped: dict[str, int]  # reason -> rows

    @property
    def unaccounted(self) -> int:
        """Rows that are neither out nor dropped. They are shown; the report does not fail, since the work is done."""
        return self.rows_in - self.rows_out - sum(self.dropped.values())


@dataclass(frozen=True)
class ReportInputs:
    """Everything that was read, and what was derived from it once."""

    cells: list[Cell]  # in the order of params.yaml, of a served workload the baseline first
    lines: list[TableLine]  # the same, point by point, joined with their baselines
    replayed_rows: list[ResultRow]  # further lines of the table: replayed trees without a cell
    replays: dict[str, list[ReplayedTree]]  # checkpoint -> its trees, replayed at temperature 0
    families: Families  # of every replayed checkpoint and every one with cells
    tree_statistics: dict[str, list[TreeBucket]]  # checkpoint -> buckets of cycles of some trees
    reports: dict[str, StageReport]
    trained: dict[str, TrainingReport]  # by checkpoint
    predicted: CostPrediction
    stage_runs: dict[str, StageRun]  # the last logged run of each stage; cells hold their own figures
    checkpoints: dict[str, DraftReport]  # trained ones, then imported ones
    verdict: Verdict

    @property
    def rows(self) -> list[ResultRow]:
        """Return the measured lines of benchmark.csv, and those that an engine can't run."""
        return [line.row for line in self.lines]

    def count_rows(self) -> list[StageRowCounts]:
        """Return the rows in, out and dropped by reason of each stage that changes how many there are."""
        found = []
        for stage in FLOW_STAGES:
            report = self.reports[stage]
            dropped = report["dropped_reasons"] if stage == "fix_data" else report["dropped"]
            found.append(StageRowCounts(stage, report["rows_in"], report["rows_out"], dropped))
        return found

    def select_checkpoint_lines(self, checkpoint: str | None) -> list[TableLine]:
        """Return the lines decoded prompt by prompt of this checkpoint, or all such lines where it has none."""
        lines = [line for line in self.lines if line.row.in_turns]
        return [line for line in lines if line.row.checkpoint == checkpoint] or lines


def describe_older_engines(launch: Iterable[LaunchAdvice]) -> list[str]:
    """Return lines for each advised draft that needs a version of its engine which is not known to be installed here."""
    lines, newer = [], {}
    for row in launch:
        if row.min_version is None:
            continue
        installed = versions.find_version(row.engine, engines.locate_program(row.engine))
        if installed and versions.parse_release(installed) >= versions.parse_release(row.min_version):
            continue
        lines += _describe_runner_up(row, installed)
        newer[row.engine] = row.min_version
    return [*lines, *(_advise_install(engine, version) for engine, version in newer.items())]


def _describe_runner_up(row: LaunchAdvice, installed: str | None) -> list[str]:
    """Return the best tree of the load that older versions run, with its flags."""
    version = f"{row.engine} {installed}, installed here," if installed else f"{row.engine} before {row.min_version}"
    line = f"{version} does not know the draft {row.checkpoint}; the best that it runs at concurrency {row.concurrency:g}: "
    best = row.runner_up
    if best is None:
        return [f"{line}no other draft is predicted"]
    speedup = f"{best.speedup:.2f}x ({format_interval(best.low, best.high, 'no interval')})"
    line += f"{format_tree(best.shape.name)} of {best.checkpoint}, predicted {speedup}"
    if best.enable:
        return [line, f"    {shlex.join(best.flags)}"]
    off = "it can't be told whether to speculate" if best.is_undecided else "leave speculation off"
    return [f"{line}: {off}"]


def _advise_install(engine: str, version: str) -> str:
    """Return how to get the version: by one of the lists in serving-env/, where there is one."""
    name = f"{engine}-{version}"
    if not (engines.ENVIRONMENTS_FOLDER / f"{name}.txt").exists():
        return f"to launch the first, get {engine} {version} or later"
    program = engines.ENVIRONMENTS_FOLDER / name / "bin" / engine
    how = f"benchmark_served.servers.{engine}.command: [{program}, serve]"
    if program.exists():
        return f"{engine} {version} is in {program.parent.parent}: {how}"
    return f"to get {engine} {version}: make serving-env ENGINE={name}, and {how}"
