"""Times that a busy machine may have spoilt, each with the command that measures them again: docs/metrics.md, "Noise".

Plain decoding of the same prompts takes as long beside one tree as beside another. So it is compared between cells, and a prefill
likewise. On a CPU a cell also has its process's own time.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from stages.cells.table import ResultRow, TableLine
from stages.cells.timing_grid import TimingGrid

FAR_PREFILL = 2.0  # times the neighbours' median
BUSY_SHARE = 0.8  # of the wall time that a process computed; below it another process had the CPU
# Of a timing grid, as shares: on an idle machine rounds differ by a few hundredths, and so do the fit and what it left out.
MAX_SPREAD, MAX_FIT_ERROR = 0.3, 0.25


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
    """Return what is odd about the times of each line with a speedup."""
    timed = [
        line for line in lines if line.row.speedup and line.row.baseline_output_throughput and not line.row.is_plain
    ]
    remarks = []
    for line in timed:
        row = line.row
        peers = [peer.row for peer in timed if peer is not line and _get_peers(peer) == _get_peers(line)]
        odd = [*_list_odd(row, peers), *_list_busy(line.point.process_share if line.point else None)]
        if odd:
            load = "" if row.in_turns else f", {row.load}"
            label = f"{row.tree} with {row.checkpoint} ({row.workload}{load})"
            remarks.append(TimingRemark(row.stage, f"{label}: {'; '.join(odd)}"))
    return remarks


def _get_peers(line: TableLine) -> tuple[object, ...]:
    """Return what lines share that decode the same prompts plainly on the same machine."""
    row = line.row
    return row.workload, row.engine, row.in_turns, row.load, line.cell.hardware


def _list_odd(row: ResultRow, peers: list[ResultRow]) -> Iterator[str]:
    """Yield what is odd beside the lines that decode the same. The requests of a load wait in a queue before their prefill."""
    plain, speedup = row.baseline_output_throughput or 0.0, row.speedup or 1.0
    if peers and row.speedup_low is not None and row.speedup_high is not None:
        ratio = plain / (usual := median(peer.baseline_output_throughput or 0.0 for peer in peers))
        if not row.speedup_low / speedup <= ratio <= row.speedup_high / speedup:
            gap = f"{abs(ratio - 1):.0%} {'above' if ratio > 1 else 'below'}"
            yield f"plain decoding, {plain:.0f} tokens/s, is {gap} its neighbours' {usual:.0f}"
    prefills = [peer.ttft_mean_s for peer in peers if peer.ttft_mean_s]
    if row.in_turns and row.ttft_mean_s and prefills:
        usual = median(prefills)
        if not 1 / FAR_PREFILL <= row.ttft_mean_s / usual <= FAR_PREFILL:
            yield f"a prefill of {row.ttft_mean_s:.3f} s beside its neighbours' {usual:.3f}"


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
