"""Everything that the report shows, as stages/report.py read it."""

from dataclasses import dataclass
from typing import Any

from stages.reporting.benchmark_table import BenchmarkRow
from stages.reporting.costs import CostPrediction
from stages.reporting.families import Families
from stages.reporting.methods import EngineSpeeds, MethodRow
from stages.reporting.verdict import Verdict
from stages.results.replay_records import ReplayedTree, TreeBucket
from stages.results.served_records import ServedCell
from stages.results.served_table import ServedTableLine
from stages.results.torch_records import Cell, TorchCell
from stages.results.training_records import DraftReport, TrainingReport
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

    cells: list[TorchCell]  # in the order of params.yaml
    rows: list[BenchmarkRow]  # the same, as lines of benchmark.csv
    replayed_rows: list[BenchmarkRow]  # its further lines: replayed trees without a cell
    replays: dict[str, list[ReplayedTree]]  # checkpoint -> its trees, replayed at temperature 0
    families: Families  # of every replayed checkpoint and every one with cells
    tree_statistics: dict[str, list[TreeBucket]]  # checkpoint -> buckets of cycles of some trees
    reports: dict[str, StageReport]
    trained: dict[str, TrainingReport]  # by checkpoint
    served: list[ServedCell]  # each workload's baseline first
    lines: list[ServedTableLine]  # the same, point by point, joined with their baselines
    predicted: CostPrediction
    methods: list[MethodRow]
    engines: list[EngineSpeeds]
    stage_runs: dict[str, StageRun | Cell]  # the last logged run of each stage; cells hold their own figures
    checkpoints: dict[str, DraftReport]  # trained ones, then imported ones
    verdict: Verdict

    @property
    def table_rows(self) -> list[BenchmarkRow]:
        """Return all lines of benchmark.csv."""
        return [*self.rows, *self.replayed_rows]

    def count_rows(self) -> list[StageRowCounts]:
        """Return the rows in, out and dropped by reason of each stage that changes how many there are."""
        found = []
        for stage in FLOW_STAGES:
            report = self.reports[stage]
            dropped = report["dropped_reasons"] if stage == "fix_data" else report["dropped"]
            found.append(StageRowCounts(stage, report["rows_in"], report["rows_out"], dropped))
        return found

    def select_checkpoint_cells(self, checkpoint: str) -> list[TorchCell]:
        """Return the torch engine's cells of this checkpoint, or all where it has none."""
        return [cell for cell in self.cells if cell.checkpoint == checkpoint] or self.cells
