"""The origin and the cost of a report: the commit it was written at, digests, machines, seconds, GPUs, energy."""

import hashlib
import json
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stages.cells.cell import Cell, Hardware, list_versions
from stages.reporting.inputs import ReportInputs, ReportSettings
from stages.telemetry.stage_log import StageRun


@dataclass(frozen=True)
class Provenance:
    """The content of the part "Where this comes from"."""

    machines: list["MachineGroup"]
    seeds: list[int]
    digest: str  # of the parameters' values
    commit: "CommitState | None"  # None outside a git repository, or without git
    versions: dict[str, str]
    target: list[str | None] | None  # (model, revision, digest of its configuration), as the timing grid has it
    weights: dict[str, str]
    tables: dict[str, str]  # sha256 of each file, by which a page and its tables are known to belong together


@dataclass(frozen=True)
class MachineGroup:
    """Cells that were measured with the same hardware, versions and engine."""

    cells: int
    hardware: Hardware
    versions: dict[str, str]
    engine: str


@dataclass(frozen=True)
class CommitState:
    """The commit the report is written at. The stages may have run at earlier ones: dvc.lock has the inputs of each."""

    id: str
    changed: list[str]  # files that differ from it


def build_provenance(settings: ReportSettings, found: ReportInputs, tables: Iterable[Path]) -> Provenance:
    return Provenance(
        machines=group_machines([cell for cell in found.cells if cell.in_turns]),
        seeds=sorted({cell.seed for cell in found.cells}),
        digest=settings.params_digest,
        commit=_read_commit(),
        versions=list_versions("aerie", "matplotlib", "jinja2"),
        target=next((cost.target for cost in found.predicted.costs if cost.target), None),
        weights={name: report.weights for name, report in found.checkpoints.items()},
        tables={str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in tables},
    )


def group_machines(cells: Sequence[Cell]) -> list[MachineGroup]:
    """Return the machines that cells were measured on, most cells first; latencies of different machines do not compare."""
    counts = Counter(json.dumps([c.hardware, c.versions, c.engine], sort_keys=True) for c in cells)
    return [MachineGroup(count, *json.loads(text)) for text, count in counts.most_common()]


def _read_commit() -> CommitState | None:
    try:
        head, changed = (
            subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout
            for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return CommitState(head.strip(), [line[3:] for line in changed.splitlines()])


# Seconds and joules


@dataclass(frozen=True)
class StageRunTotals:
    """Sums over runs."""

    stage: str
    runs: int
    seconds: float
    gpu_seconds: float
    gpus: str  # how many of which, in words
    joules: float | None  # None where a run on a GPU lacks them
    is_counted: bool  # whether any GPU counted its energy


def summarise_stage_runs(stages: Mapping[str, StageRun | Cell], cells: Sequence[Cell]) -> list[StageRunTotals]:
    """Return sums of the last logged run of each stage, of the cells by engine and workload, and of all, which is last."""
    groups: dict[str, list[StageRun | Cell]] = {name: [run] for name, run in stages.items()}
    for cell in cells:
        stage = f"benchmark_served, {cell.engine}" if cell.is_served else "benchmark"
        groups.setdefault(f"{stage}, {cell.workload}", []).append(cell)
    groups["all"] = [*stages.values(), *cells]
    return [_sum_runs(name, records) for name, records in groups.items()]


def _sum_runs(stage: str, records: Sequence[StageRun | Cell]) -> StageRunTotals:
    joules = [record.joules for record in records if record.gpus]
    known = [value for value in joules if value is not None]
    counts = [Counter(record.gpus) for record in records if record.gpus]
    gpus = dict.fromkeys(", ".join(f"{count} x {name}" for name, count in machine.items()) for machine in counts)
    return StageRunTotals(
        stage,
        runs=len(records),
        seconds=sum(record.seconds for record in records),
        gpu_seconds=sum(record.seconds * len(record.gpus) for record in records),
        gpus="; ".join(gpus),
        joules=sum(known) if joules and len(known) == len(joules) else None,
        is_counted=any(record.joules is not None for record in records),
    )


def format_energy(joules: float | None) -> str:
    """Return Wh, from a thousand on kWh, and a dash for None."""
    if joules is None:
        return "–"
    hours = joules / 3600
    return f"{hours / 1000:.3g} kWh" if hours >= 1000 else f"{hours:.3g} Wh"
