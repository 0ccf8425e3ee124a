"""Where a report comes from and what it took: the commit it was written at, digests, seconds, GPUs, energy."""

import hashlib
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Row = dict[str, Any]

KILO, WATT_HOUR = 1000, 3600  # joules of a watt-hour


def read_commit() -> Row | None:
    """Of the repository we stand in; None where there is none, or no git. `changed`: files that differ from it.

    The stages may have run at earlier commits: dvc.lock says what each of them ran on.
    """
    head, changed = _run_git("rev-parse", "HEAD"), _run_git("status", "--porcelain", "--untracked-files=no")
    if head is None or changed is None:
        return None
    return {"id": head.strip(), "changed": [line[3:] for line in changed.splitlines()]}


def _run_git(*words: str) -> str | None:
    try:
        asked = subprocess.run(["git", *words], capture_output=True, text=True)
    except OSError:
        return None
    return None if asked.returncode else asked.stdout


def list_installed_versions(*packages: str) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            pass
    return found


def digest_each_file(places: Iterable[Path]) -> dict[str, str]:
    """sha256 of each file, so that a page and the tables beside it can be told to belong together."""
    return {str(place): hashlib.sha256(place.read_bytes()).hexdigest() for place in places}


def summarise_stage_records(stages: dict[str, Row], cells: list[Row]) -> Row:
    """A line for each stage and for the cells of each engine and workload, and their sum.

    `stages` holds the last logged run of each stage (telemetry/stage_log.py); a cell has the same three keys.
    """
    lines = [{"stage": name, "runs": 1, **_sum_records([record])} for name, record in stages.items()]
    kinds = dict.fromkeys(("benchmark" if c["engine"] == "torch" else "benchmark_served", c["workload"]) for c in cells)
    for stage, workload in kinds:
        mine = [c for c in cells if (c["engine"] == "torch") == (stage == "benchmark") and c["workload"] == workload]
        lines.append({"stage": f"{stage}, {workload}", "runs": len(mine), **_sum_records(mine)})
    every = [*stages.values(), *cells]
    return {
        "lines": lines,
        "all": _sum_records(every),
        "counted": any(record["joules"] is not None for record in every),
    }


def _sum_records(records: list[Row]) -> Row:
    """Seconds, GPU-seconds, the GPUs in words, and joules: None where a record with a GPU lacks them."""
    joules = [record["joules"] for record in records if record["gpus"]]
    kinds = dict.fromkeys(_count_gpu_names(record["gpus"]) for record in records if record["gpus"])
    return {
        "seconds": sum(record["seconds"] for record in records),
        "gpu_seconds": sum(record["seconds"] * len(record["gpus"]) for record in records),
        "gpus": "; ".join(kinds),
        "joules": None if not joules or None in joules else sum(joules),
    }


def _count_gpu_names(names: list[str]) -> str:
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def format_energy(joules: float | None) -> str:
    """In Wh, kWh from a thousand on; a dash for what isn't known."""
    if joules is None:
        return "–"
    hours = joules / WATT_HOUR
    return f"{hours / KILO:.3g} kWh" if hours >= KILO else f"{hours:.3g} Wh"


def format_duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {left:02d} s"
