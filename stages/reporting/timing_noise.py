"""Times that a busy machine may have spoilt, each with the command that measures them again: docs/metrics.md, "Noise".

Plain decoding of the same prompts takes as long beside one tree as beside another. So it is compared between cells, and a prefill
likewise. On a CPU a cell also has its process's own time.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from stages.cells.table import TableLine
from stages.cells.timing_grid import TimingGrid

FAR_PREFILL = 2.0  # times the neighbours' median
BUSY_SHARE = 0.8  # of the wall time that a process computed; below it another process had the CPU
# Of a timing grid, as shares: on an idle machine rounds differ by a few hundredths, and so do the fit and what it left out.
MAX_SPREAD, MAX_FIT_ERROR = 0.3, 0.25


@dataclass(frozen=True)
class TimedCell:
    """The times of a cell at one load."""

    stage: str  # of dvc.yaml
    label: str
    peers: tuple[object, ...]  # cells with equal ones decode the same prompts plainly on the same machine
    plain_tok_s: float
    low: float | None  # the ends of the speedup's interval, as shares of it; None without one
    high: float | None
    prefill_s: float | None  # None where it holds waiting in a queue
    process_share: float | None  # of the wall time; None on a GPU

    def list_odd(self, peers: list["TimedCell"]) -> Iterator[str]:
        """Yield what is odd, by itself and beside the cells that decode the same."""
        if peers and self.low is not None and self.high is not None:
            ratio = self.plain_tok_s / (usual := median(peer.plain_tok_s for peer in peers))
            if not self.low <= ratio <= self.high:
                gap = f"{abs(ratio - 1):.0%} {'above' if ratio > 1 else 'below'}"
                yield f"plain decoding, {self.plain_tok_s:.0f} tokens/s, is {gap} its neighbours' {usual:.0f}"
        prefills = [peer.prefill_s for peer in peers if peer.prefill_s]
        if self.prefill_s and prefills and not 1 / FAR_PREFILL <= self.prefill_s / median(prefills) <= FAR_PREFILL:
            yield f"a prefill of {self.prefill_s:.3f} s beside its neighbours' {median(prefills):.3f}"
        yield from _list_busy(self.process_share)


@dataclass(frozen=True)
class TimingRemark:
    """A reason to doubt the times of a stage."""

    stage: str
    text: str

    def __str__(self) -> str:
        return f"{self.text}; again: dvc repro -fs {self.stage}"


def summarise_remarks(remarks: Sequence[TimingRemark]) -> list[str]:
    """Return the terminal's line: of several remarks their number, and the command that measures all of them again."""
    if len(remarks) < 2:
        return list(map(str, remarks))
    stages = list(dict.fromkeys(remark.stage for remark in remarks))
    cells = f"{len(stages)} stages have" if len(stages) > 1 else f"a cell has {len(remarks)}"
    return [
        f"{cells} doubtful timings, each explained on the page; again, on an idle machine: dvc repro -fs {' '.join(stages)}"
    ]


def find_timing_remarks(lines: Iterable[TableLine]) -> list[TimingRemark]:
    """Return what is odd about the times of each line."""
    timed = list(filter(None, map(time_line, lines)))
    remarks = []
    for cell in timed:
        peers = [peer for peer in timed if peer.peers == cell.peers and peer is not cell]
        if odd := list(cell.list_odd(peers)):
            remarks.append(TimingRemark(cell.stage, f"{cell.label}: {'; '.join(odd)}"))
    return remarks


def find_grid_remarks(grids: Iterable[TimingGrid]) -> list[TimingRemark]:
    """Return what is odd about the times of each grid, of which nothing is predicted then."""
    remarks = []
    for grid in grids:
        odd = list(_list_busy(grid.process_share))
        if grid.spread is not None and grid.spread > MAX_SPREAD:
            odd.append(f"its plain step took {grid.spread:.0%} longer in one round than in another")
        if grid.fit.error > MAX_FIT_ERROR:
            odd.append(f"its fit is {grid.fit.error:.0%} off the trees left out")
        if odd:
            name = f"the timing grid of {grid.checkpoint} ({grid.engine})"
            remarks.append(TimingRemark(grid.stage, f"{name} predicts nothing: {'; '.join(odd)}"))
    return remarks


def _list_busy(process_share: float | None) -> Iterator[str]:
    if process_share is not None and process_share < BUSY_SHARE:
        yield f"another process had the CPU: this one computed {process_share:.0%} of the wall time"


def time_line(line: TableLine) -> TimedCell | None:
    """Return the times of a line; None without a speedup. The requests of a load wait in a queue before their prefill."""
    row, point = line.row, line.point
    if row.is_plain or not row.speedup or not row.baseline_output_throughput or point is None:
        return None
    load = "" if row.in_turns else f", {row.load}"
    return TimedCell(
        stage=row.stage,
        label=f"{row.tree} with {row.checkpoint} ({row.workload}{load})",
        peers=(row.workload, row.engine, row.in_turns, *row.load, *sorted(line.cell.hardware.items())),
        plain_tok_s=row.baseline_output_throughput,
        low=row.speedup_low and row.speedup_low / row.speedup,
        high=row.speedup_high and row.speedup_high / row.speedup,
        prefill_s=row.ttft_mean_s if row.in_turns else None,
        process_share=point.process_share,
    )
