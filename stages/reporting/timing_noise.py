"""Times that a busy machine may have spoilt, each with the command that measures them again: docs/metrics.md, "Noise".

Plain decoding of the same prompts takes as long beside one tree as beside another. So it is compared between cells, and with
the plain step of the timing grid; a prefill is compared likewise. On a CPU a cell also has its process's own time.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from stages.results import interval, prediction_check, served_records, timing_grid
from stages.results.served_table import SPECULATIVE, ServedTableLine
from stages.results.timing_grid import TimingGrid
from stages.results.torch_records import Hardware, StoppingRecord, TorchCell, name_torch_stage

FAR_PREFILL = 2.0  # times the neighbours' median
BUSY_SHARE = 0.8  # of the wall time that a process computed; below it another process had the CPU


@dataclass(frozen=True)
class TimedCell:
    """The times of a cell at one load."""

    stage: str  # of dvc.yaml
    label: str
    peers: tuple[object, ...]  # cells with equal ones decode the same prompts plainly on the same machine
    plain_tok_s: float
    low: float | None  # the ends of the speedup's interval, as shares of it; None without one
    high: float | None
    prefill_s: float | None = None  # None where it holds waiting in a queue
    plain_step_s: float | None = None  # None where no timing grid has such a step
    process_share: float | None = None  # of the wall time; None on a GPU
    stopping: StoppingRecord | None = None

    def allows(self, ratio: float, margin: float = 0.0) -> bool:
        """Return whether a ratio of plain speeds lies within the speedup's interval, widened by `margin`; True without one."""
        return self.low is None or self.high is None or self.low - margin <= ratio <= self.high + margin


@dataclass(frozen=True)
class TimingRemark:
    """A reason to doubt the times of a stage."""

    stage: str
    text: str

    @property
    def command(self) -> str:
        """Return the command that measures it again."""
        return f"aerie rerun {self.stage}"

    def __str__(self) -> str:
        return f"{self.text}; again: {self.command}"


def summarise_remarks(remarks: Sequence[TimingRemark]) -> list[str]:
    """Return the terminal's line: of several remarks their number, and the command that measures all of them again."""
    if len(remarks) < 2:
        return list(map(str, remarks))
    stages = list(dict.fromkeys(remark.stage for remark in remarks))
    cells = f"{len(stages)} cells have" if len(stages) > 1 else f"a cell has {len(remarks)}"
    return [
        f"{cells} doubtful timings, each explained on the page; again, on an idle machine: aerie rerun {' '.join(stages)}"
    ]


def find_timing_remarks(
    cells: list[TorchCell],
    lines: Iterable[ServedTableLine],
    grids: Iterable[TimingGrid],
) -> list[TimingRemark]:
    """Return what is odd about the times of each torch cell, point of loads, and timing grid of the torch engine."""
    timed = [*map(time_torch_cell, cells), *filter(None, map(time_line, lines))]
    found: dict[tuple[str, str], list[str]] = {(cell.stage, cell.label): [] for cell in timed}
    for stage, label, reason in _list_odd_times(cells, timed, grids):
        found.setdefault((stage, label), []).append(reason)
    return [
        TimingRemark(stage, f"{label}: {'; '.join(reasons)}") for (stage, label), reasons in found.items() if reasons
    ]


def time_torch_cell(cell: TorchCell) -> TimedCell:
    """Return the times of a cell whose prompts were answered one by one."""
    found, decoding = cell.metrics, prediction_check.measure_torch_cell(cell)
    return TimedCell(
        stage=name_torch_stage(cell.workload, cell.checkpoint, cell.tree),
        label=f"{cell.tree} with {cell.checkpoint} ({cell.workload})",
        peers=(cell.workload, cell.engine, *sorted(cell.hardware.items())),
        plain_tok_s=found.baseline_output_tok_s,
        low=found.speedup_low and found.speedup_low / found.speedup,
        high=found.speedup_high and found.speedup_high / found.speedup,
        prefill_s=found.prefill_latency_s,
        plain_step_s=decoding.plain_step_s if decoding else None,
        process_share=cell.process_share,
        stopping=cell.stopping,
    )


def time_line(line: ServedTableLine) -> TimedCell | None:
    """Return the times of a point of loads; None without a speedup. Its requests wait in a queue before their prefill."""
    row, cell = line.row, line.cell
    if row.decoding != SPECULATIVE or not row.speedup or not row.baseline_output_throughput:
        return None
    return TimedCell(
        stage=served_records.name_served_stage(row.workload, row.checkpoint, row.tree, row.engine),
        label=f"{row.tree} with {row.checkpoint} ({row.workload}, {row.load})",
        peers=(row.workload, row.engine, *row.load, *sorted(cell.hardware.items())),
        plain_tok_s=row.baseline_output_throughput,
        low=row.speedup_low and row.speedup_low / row.speedup,
        high=row.speedup_high and row.speedup_high / row.speedup,
        process_share=line.point.process_share if line.point else None,
        stopping=line.point.stopping if line.point else None,
    )


OddTime = tuple[str, str, str]  # stage, label, what is odd


def _compare_with_peers(timed: list[TimedCell], confirmed: Collection[str]) -> Iterator[OddTime]:
    """Yield the cells whose plain decoding or prefill is far from the median of the others that decode the same."""
    for cell in timed:
        peers = [peer for peer in timed if peer.peers == cell.peers and peer is not cell]
        if not peers:
            continue
        peer_median = median(peer.plain_tok_s for peer in peers)
        if cell.stage not in confirmed and not cell.allows(cell.plain_tok_s / peer_median):
            gap = _describe_gap(cell.plain_tok_s / peer_median)
            text = f"plain decoding, {cell.plain_tok_s:.0f} tokens/s, is {gap} its neighbours' {peer_median:.0f}"
            yield cell.stage, cell.label, text
        prefills = [peer.prefill_s for peer in peers if peer.prefill_s]
        if cell.prefill_s and prefills and not 1 / FAR_PREFILL <= cell.prefill_s / median(prefills) <= FAR_PREFILL:
            text = f"a prefill of {cell.prefill_s:.3f} s beside its neighbours' {median(prefills):.3f}"
            yield cell.stage, cell.label, text


@dataclass(frozen=True)
class GridComparison:
    """The plain steps of cells beside those of the timing grids of the same machine."""

    odd: list[OddTime]
    confirmed: frozenset[str]  # stages whose step is the grid's; their neighbours have nothing to add


@dataclass(frozen=True)
class GridStep:
    """The plain step that a timing grid was measured with. It has no draft: grids of a machine measure the same."""

    checkpoint: str
    step_s: float
    margin: float  # half of its 95% interval, as a share

    def is_allowed_by(self, cell: TimedCell, step_s: float) -> bool:
        return cell.allows(self.step_s / step_s, self.margin)


def _compare_with_grids(cells: list[TorchCell], grids: Iterable[TimingGrid]) -> GridComparison:
    """Return the cells whose plain step is not that of their machine's timing grids, and the grids that most cells contradict.

    Each cell is compared once, with the grid of its machine that knows the plain step best: with the grid of each draft, one
    doubtful grid would be enough for a remark.
    """
    odd: list[OddTime] = []
    confirmed: set[str] = set()
    for hardware, machine_grids in _group_by_machine(grids):
        machine_cells = [cell for cell in cells if not timing_grid.list_hardware_differences(hardware, cell.hardware)]
        steps = [(timed, timed.plain_step_s) for timed in map(time_torch_cell, machine_cells) if timed.plain_step_s]
        median_step_s = median([step_s for _, step_s in steps] or [0.0])
        trusted: list[GridStep] = []
        for grid in machine_grids:
            off = [cell for cell, step_s in steps if not grid.is_allowed_by(cell, step_s)]
            if len(steps) > 2 and 2 * len(off) > len(steps):
                gap = _describe_gap(grid.step_s / median_step_s)
                text = f"its plain step, {1000 * grid.step_s:.2f} ms, is {gap} that of most cells, {1000 * median_step_s:.2f} ms"
                odd.append((f"time_trees@{grid.checkpoint}", f"time_trees at {grid.checkpoint}", text))
            else:
                trusted.append(grid)
        if not trusted:
            continue
        best = min(trusted, key=lambda grid: grid.margin)
        for cell, step_s in steps:
            if best.is_allowed_by(cell, step_s):
                confirmed.add(cell.stage)
                continue
            gap, reference = _describe_gap(step_s / best.step_s), f"{1000 * best.step_s:.2f} with {best.checkpoint}"
            text = f"a plain step of {1000 * step_s:.2f} ms is {gap} time_trees' {reference}"
            odd.append((cell.stage, cell.label, text))
    return GridComparison(odd, frozenset(confirmed))


def _group_by_machine(grids: Iterable[TimingGrid]) -> list[tuple[Hardware, list[GridStep]]]:
    """Return the plain steps of one prompt at a time by machine, without those whose error is unknown."""
    found: list[tuple[Hardware, list[GridStep]]] = []
    for grid in grids:
        plain_step = next((step for step in grid.plain if step.batch == 1), None)
        margin = interval.compute_margin(plain_step.error, plain_step.samples) if plain_step else None
        if plain_step is None or margin is None:
            continue
        machine_steps = (
            steps for hardware, steps in found if not timing_grid.list_hardware_differences(hardware, grid.hardware)
        )
        steps = next(machine_steps, None)
        if steps is None:
            steps = []
            found.append((grid.hardware, steps))
        steps.append(GridStep(grid.checkpoint, plain_step.step_s, margin))
    return found


def _list_odd_times(cells: list[TorchCell], timed: list[TimedCell], grids: Iterable[TimingGrid]) -> Iterator[OddTime]:
    comparison = _compare_with_grids(cells, grids)
    yield from comparison.odd
    yield from _compare_with_peers(timed, comparison.confirmed)
    yield from _list_busy(timed)
    yield from _list_unsure(timed)


def _list_busy(timed: list[TimedCell]) -> Iterator[OddTime]:
    for cell in timed:
        if cell.process_share is not None and cell.process_share < BUSY_SHARE:
            text = f"another process had the CPU: this one computed {cell.process_share:.0%} of the wall time"
            yield cell.stage, cell.label, text


def _list_unsure(timed: list[TimedCell]) -> Iterator[OddTime]:
    """Yield the cells that spent their repeats before their speedup was known as well as `until` asks."""
    for cell in timed:
        if cell.stopping and cell.stopping.rule == "most_repeats":
            half = cell.stopping.half_width
            precision = "without an interval" if half is None else f"at ±{half:.0%} of its speedup"
            yield cell.stage, cell.label, f"its {cell.stopping.repeats} repeats, the most, were spent {precision}"


def _describe_gap(ratio: float) -> str:
    return f"{abs(ratio - 1):.0%} {'above' if ratio > 1 else 'below'}"
