"""Everything that the report shows, as stages/report.py read it."""

from dataclasses import dataclass
from typing import Any

from stages.reporting.costs import CostPrediction
from stages.results.served_table import ServedTableLine

Row = dict[str, Any]
FLOW_STAGES = ("fix_data", "sample_target", "extract_hiddens")


@dataclass(frozen=True)
class ReportSettings:
    """The values of params.yaml that the page shows."""

    title: str
    model: str
    benchmark_trees: list[str]
    other_methods: set[str]  # checkpoints of other methods than EAGLE-3: no curve of theirs is drawn
    imported: dict[str, Row]  # checkpoint -> its section of import_draft
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

    cells: list[Row]  # as in stages/results/torch_records.py, in the order of params.yaml
    rows: list[Row]  # the same, as lines of benchmark.csv
    replays: dict[str, list[Row]]  # checkpoint -> its trees, replayed at temperature 0
    tree_statistics: dict[str, list[Row]]  # checkpoint -> buckets of cycles of some trees
    reports: dict[str, Row]  # stage -> its own report
    trained: dict[str, Row]  # checkpoint -> its epochs
    served: list[Row]  # as in stages/results/served_records.py, each workload's baseline first
    lines: list[ServedTableLine]  # the same, point by point, joined with their baselines
    predicted: CostPrediction
    methods: list[Row]  # as methods.METHOD_TABLE_COLUMNS
    engines: list[Row]  # as methods.compare_engines
    stage_runs: dict[str, Row]  # stage -> seconds, gpus and joules of its run
    weights: dict[str, str]  # checkpoint -> digest of the draft's weights

    def count_rows(self) -> list[StageRowCounts]:
        """Return the rows in, out and dropped by reason of each stage that changes how many there are."""
        found = []
        for stage in FLOW_STAGES:
            report = self.reports[stage]
            dropped = report["dropped_reasons"] if stage == "fix_data" else report["dropped"]
            found.append(StageRowCounts(stage, report["rows_in"], report["rows_out"], dropped))
        return found

    def select_checkpoint_cells(self, checkpoint: str) -> list[Row]:
        """Return the torch engine's cells of this checkpoint, or all where it has none."""
        return [cell for cell in self.cells if cell["checkpoint"] == checkpoint] or self.cells
