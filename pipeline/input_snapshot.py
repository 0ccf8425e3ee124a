"""Record a stage with the inputs that it began with, and have it read params.yaml as it was then.

DVC reads a stage's inputs again when its command has ended. So an edit of params.yaml for the next run, made while a stage is at
work, was recorded as what this result was made by: nothing was stale afterwards, and the run-cache returned the result for the
edited parameters ever after. Here a stage

    reads a copy of params.yaml, as it was when the stage began (stages/params/started_params.py);
    is recorded with the parameters and the code of that moment, and is stale afterwards where they have changed;
    fails where another input has changed: what it made may be of both.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# As in stages.params.section and stages.params.started_params: importing `stages` in DVC's process ends its forking of stages.
PARAMS_FILE, COPY_VARIABLE = Path("params.yaml"), "AERIE_STARTED_PARAMS"
COPIES_FOLDER = Path(".scratch/stage_params")
STARTED = "input_snapshot"  # a stage's attribute while its command runs: hash and meta of each dependency

log = logging.getLogger("dvc.input_snapshot")  # below DVC's own, whose handlers print warnings


def record_started_inputs() -> None:
    """Make every stage that this process runs from now on recorded with what it began with. Safe to call twice."""
    from dvc.stage import Stage
    from dvc.stage import run as stage_run

    run_command, save, save_deps = stage_run.cmd_run, Stage.save, Stage.save_deps
    if getattr(run_command, "records", False):
        return

    def run(stage: Any, dry: bool = False, run_env: dict[str, str] | None = None) -> None:
        if dry:
            run_command(stage, dry=True, run_env=run_env)
            return
        with _copy_params(stage) as variables:
            setattr(stage, STARTED, [(dep.hash_info, dep.meta) for dep in stage.deps])
            try:
                run_command(stage, run_env=(run_env or {}) | variables)
            except BaseException:
                delattr(stage, STARTED)
                raise

    def save_started(stage: Any, *words: Any, **options: Any) -> None:
        try:
            changed = _check_changes(stage)
            save(stage, *words, **options)
        finally:
            vars(stage).pop(STARTED, None)
            for dep in stage.deps:
                vars(dep).pop("get_hash", None)
        if changed:
            log.warning(
                f"{stage.addressing} is recorded with what it began with: {', '.join(changed)} changed while it was at work. "
                "It is stale again"
            )

    def save_started_deps(stage: Any, allow_missing: bool = False) -> None:
        started = vars(stage).get(STARTED)
        if started is None:
            save_deps(stage, allow_missing=allow_missing)
            return
        for dep, (hash_info, meta) in zip(stage.deps, started, strict=True):
            dep.hash_info, dep.meta = hash_info, meta
            dep.get_hash = lambda hash_info=hash_info: hash_info  # the run-cache asks whether there is one

    run.records = True  # type: ignore[attr-defined]
    stage_run.cmd_run, Stage.save, Stage.save_deps = run, save_started, save_started_deps


@contextmanager
def _copy_params(stage: Any) -> Iterator[dict[str, str]]:
    """Copy params.yaml for a stage whose inputs DVC hashes meanwhile; yield the variable that names the copy."""
    copy = (COPIES_FOLDER / f"{_get_name(stage)}.yaml").absolute()
    text = None
    while text is None or (PARAMS_FILE.exists() and PARAMS_FILE.read_bytes() != text):  # edited since it was read
        text = PARAMS_FILE.read_bytes() if PARAMS_FILE.exists() else b""
        stage.save_deps(allow_missing=True)
    if not text:
        yield {}
        return
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes(text)
    try:
        yield {COPY_VARIABLE: str(copy)}
    finally:
        copy.unlink(missing_ok=True)


def _get_name(stage: Any) -> str:
    return str(stage.addressing).rpartition(":")[2]


def _check_changes(stage: Any) -> list[str]:
    """Return the parameters and files of code that have changed since the stage began.

    Raises:
        DvcException: naming another input that has changed.
    """
    from dvc.exceptions import DvcException

    names: list[str] = []
    hashes_at_start = vars(stage).get(STARTED)
    if hashes_at_start is None:  # restored, or not run by a command
        return names
    for dep, (started, _) in zip(stage.deps, hashes_at_start, strict=True):
        try:
            found = dep.get_hash()
        except (DvcException, OSError):  # removed, or being written
            found = None
        if found == started:
            continue
        if hasattr(dep, "params"):
            values = found.value if found else {}
            names += [key for key, value in started.value.items() if values.get(key) != value]
        elif str(dep).endswith(".py"):
            names.append(str(dep))
        else:
            raise DvcException(
                f"{dep} changed while {_get_name(stage)} was at work; what it made may be of both, so it is not recorded. Run "
                "again"
            )
    return names
