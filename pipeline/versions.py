"""Artifacts that were made with another release of torch or transformers than is installed now: a warning, never a rerun.

A release is major.minor for torch, which has been 2.x for years and changes kernels and random numbers with the minor number,
and the major number for transformers, whose minor releases come every few weeks. The log of runs (stages/telemetry/stage_log.py)
says what each run loaded; a run belongs to an artifact where the artifact's files were written while it lasted. DVC's hard
links keep files' times, so what comes back from its cache is taken for what it is; of files that were copied or pulled
nothing is known, and nothing said.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ruamel.yaml import YAML

from stages.telemetry import stage_log
from stages.telemetry.stage_log import StageRun

LOCK_FILE = Path("dvc.lock")
KNOWN = Path(".scratch/versions.json")
RELEASE_PARTS = {"torch": 2, "transformers": 1}  # of a version's numbers, those that name a release
SLACK_NS = 2_000_000_000  # file systems that count time in seconds or two


def warnings() -> list[str]:
    """Return a line for each set of other versions, with the stages; from .scratch where log and lock are as they were."""
    now = _installed()
    look = _look(now)
    try:
        known = json.loads(KNOWN.read_text(encoding="utf-8"))
        if known["look"] == look:
            return [str(line) for line in known["lines"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    lines = list(_lines(now))
    KNOWN.parent.mkdir(exist_ok=True)
    beside = KNOWN.with_suffix(f".{os.getpid()}")
    beside.write_text(json.dumps({"look": look, "lines": lines}), encoding="utf-8")
    os.replace(beside, KNOWN)
    return lines


def _look(now: dict[str, str]) -> str:
    """A digest of what the warnings depend on, asked of the file system alone."""
    total = hashlib.sha256(json.dumps(now, sort_keys=True).encode())
    for path in (stage_log.LOG_FILE, LOCK_FILE):
        found = path.stat() if path.exists() else None
        total.update(f"{path} {found and (found.st_size, found.st_mtime_ns, found.st_ino)}\n".encode())
    return total.hexdigest()


def _installed() -> dict[str, str]:
    found = {}
    for package in RELEASE_PARTS:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            pass
    return found


def _lines(now: dict[str, str]) -> Iterator[str]:
    """In the order of the lock file, stages of the same other versions on one line."""
    runs = stage_log.read_log()
    suspects = {run.stage for run in runs if _others(run, now)}
    if not suspects or not LOCK_FILE.exists():
        return
    stages: dict[str, list[str]] = {}
    for name, stage in (YAML(typ="safe").load(LOCK_FILE).get("stages") or {}).items():
        if name not in suspects:
            continue
        run = _maker([run for run in runs if run.stage == name], [out["path"] for out in stage.get("outs", [])])
        if run and (others := _others(run, now)):
            stages.setdefault("; ".join(others), []).append(name)
    for said, names in stages.items():
        yield (
            f"made by other versions: {', '.join(names)} ({said}); nothing reruns for it, dvc repro -f -s NAME makes one again"
        )


def _others(run: StageRun, now: dict[str, str]) -> list[str]:
    """The packages of another release than the installed one: `torch 2.11.0, now 2.13.0`."""
    return [
        f"{package} {made_by}, now {now[package]}"
        for package, made_by in run.versions.items()
        if package in now and _release(package, made_by) != _release(package, now[package])
    ]


def _release(package: str, given: str) -> list[str]:
    return given.split("+")[0].split(".")[: RELEASE_PARTS[package]]


def _maker(runs: list[StageRun], outs: Iterable[str]) -> StageRun | None:
    """The run that wrote the newest file of the outputs; None where none did."""
    written = max((file.stat().st_mtime_ns for out in outs for file in _files(Path(out))), default=None)
    if written is None:
        return None
    return next((r for r in reversed(runs) if r.began_ns - SLACK_NS <= written <= r.ended_ns + SLACK_NS), None)


def _files(out: Path) -> Iterator[Path]:
    if out.is_dir():
        yield from (file for file in out.rglob("*") if file.is_file())
    elif out.is_file():
        yield out
