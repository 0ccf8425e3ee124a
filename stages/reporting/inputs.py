"""Everything that the report shows, as stages/report.py read it: the reports of stages, and what was derived."""

from dataclasses import dataclass
from typing import Any

from pydantic import Field

from stages.cells.cell import Cell
from stages.cells.record import Record
from stages.cells.replay_records import ReplayedTree, TreeBucket
from stages.cells.table import ResultRow, TableLine
from stages.cells.training_records import DraftReport, TrainingReport
from stages.reporting.costs import CostPrediction
from stages.reporting.families import Families
from stages.reporting.verdict import Verdict
from stages.telemetry.stage_log import StageRun


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
    reports: dict[str, dict[str, Any]]  # what each stage reports of itself; the page shows every value
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
        keys = {"fix_data": "dropped_reasons", "sample_target": "dropped", "extract_hiddens": "dropped"}
        reports = [(stage, self.reports[stage], key) for stage, key in keys.items()]
        return [StageRowCounts(stage, one["rows_in"], one["rows_out"], one[key]) for stage, one, key in reports]

    def select_checkpoint_lines(self, checkpoint: str | None) -> list[TableLine]:
        """Return the lines decoded prompt by prompt of this checkpoint, or all such lines where it has none."""
        lines = [line for line in self.lines if line.row.in_turns]
        return [line for line in lines if line.row.checkpoint == checkpoint] or lines


# Reports of stages


class StageReport(Record, extra="allow"):
    """The JSON that a stage reports of itself: the keys that the page shows by name; other keys pass as they are."""


class FixReport(StageReport):
    rows_in: int
    rows_out: int
    seconds: float
    rules: dict[str, int]
    dropped_reasons: dict[str, int]
    examples: dict[str, dict[str, str]]  # by rule: origin, before, after
    formats: dict[str, int]
    hub: dict[str, dict[str, Any]]  # by file: dataset, split, commit
    unread_keys: dict[str, int] = Field(default_factory=dict)


class ExtractionReport(StageReport):
    rows_in: int
    rows_out: int
    dropped: dict[str, int]
    seconds: float


class SampleReport(ExtractionReport):
    target: str = ""
    sources: dict[str, dict[str, dict[str, int]]]  # by split and file: questions asked and not_asked
    preview: list[dict[str, Any]]
    warnings: list[str] = Field(default_factory=list)


class VocabularyReport(StageReport):
    draft_vocab_size: int
    target_vocab_size: int
    coverage_train: float
    coverage_eval: float


class OverfitReport(StageReport):
    tau: float
    perfect_tau: float = 0.0
    required_tau: float
    min_tau: float
    steps: int
    losses: list[float]
    block_drafts: dict[str, dict[str, Any]] = Field(default_factory=dict)  # tau, perfect_tau and required_tau of each
