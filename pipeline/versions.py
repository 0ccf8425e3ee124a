"""Artifacts that were made with another release of torch or transformers than is installed now: a warning, never a rerun.

A release is major.minor for torch, which has been 2.x for years and changes kernels and random numbers with the minor number,
and the major number for transformers, whose minor releases come every few weeks. The log of runs (stages/telemetry/stage_log.py)
says what each run loaded; a run belongs to an artifact where the artifact's files were written while it lasted. DVC's hard
links keep files' times, so what comes back from its cache is taken for what it is; of files that were copied or pulled
nothing is known, and nothing said.
"""

from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path

from ruamel.yaml import YAML

from pipeline import freshness
from stages.telemetry import stage_log
from stages.telemetry.stage_log import StageRun

LOCK_FILE = Path("dvc.lock")
KNOWN_LINES_FILE = Path(".scratch/versions.json")
RELEASE_PARTS = {"torch": 2, "transformers": 1}  # of a version's numbers, those that name a release
SLACK_NS = 2_000_000_000  # file systems that count time in seconds or two


def list_warnings() -> list[str]:
    """Return a line for each set of other versions, with the stages; from .scratch if log and lock are as they were."""
    installed = {package: version(package) for package in RELEASE_PARTS}
    digest = f"{installed} {freshness.digest_paths([str(stage_log.LOG_FILE), str(LOCK_FILE)])}"
    known = freshness.read_known(KNOWN_LINES_FILE)
    if known and known["look"] == digest:
        return list(known["lines"])
    lines = list(_describe_other_versions(installed))
    freshness.write_known(KNOWN_LINES_FILE, {"look": digest, "lines": lines})
    return lines


def _describe_other_versions(installed: dict[str, str]) -> Iterator[str]:
    """Yield the lines in the order of the lock file, stages of the same other versions on one line."""
    runs = stage_log.read_log()
    suspects = {run.stage for run in runs if _list_other_versions(run, installed)}
    if not suspects or not LOCK_FILE.exists():
        return
    stages: dict[str, list[str]] = {}
    for name, stage in (YAML(typ="safe").load(LOCK_FILE).get("stages") or {}).items():
        if name not in suspects:
            continue
        outs = [out["path"] for out in stage.get("outs", [])]
        run = _find_making_run([run for run in runs if run.stage == name], outs)
        if run and (others := _list_other_versions(run, installed)):
            stages.setdefault("; ".join(others), []).append(name)
    for found, names in stages.items():
        yield (
            f"made by other versions: {', '.join(names)} ({found}); nothing reruns for it, dvc repro -f -s NAME makes one again"
        )


def _list_other_versions(run: StageRun, installed: dict[str, str]) -> list[str]:
    """Return the packages of another release than the installed one: `torch 2.11.0, now 2.13.0`."""
    return [
        f"{package} {made_by}, now {installed[package]}"
        for package, made_by in run.versions.items()
        if package in installed and _get_release(package, made_by) != _get_release(package, installed[package])
    ]


def _get_release(package: str, full_version: str) -> list[str]:
    return full_version.split("+")[0].split(".")[: RELEASE_PARTS[package]]


def _find_making_run(runs: list[StageRun], outs: Iterable[str]) -> StageRun | None:
    """Return the run that wrote the newest file of the outputs; None if none did."""
    files = [file for out in outs for file in (Path(out), *Path(out).rglob("*")) if file.is_file()]
    written = max((file.stat().st_mtime_ns for file in files), default=None)
    if written is None:
        return None
    return next((r for r in reversed(runs) if r.began_ns - SLACK_NS <= written <= r.ended_ns + SLACK_NS), None)
