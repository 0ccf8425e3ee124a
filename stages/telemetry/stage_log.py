"""The log of stage runs, logs/stages.jsonl: a line per run that ended well.

The log is neither a dependency nor an output of any stage, so seconds, joules and versions wake nothing. The report shows the
last run of each stage.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from pydantic import TypeAdapter

from stages.runtime import guarded_files
from stages.telemetry.gpu_energy import EnergyMeter

LOG_FILE = Path("logs/stages.jsonl")
PACKAGES = ("torch", "transformers")


@dataclass(frozen=True)
class StageRun:
    """One run of a stage: of the process that finished, not of killed ones before it."""

    stage: str  # its name in dvc.yaml, as train_draft@e003
    began_ns: int  # time.time_ns, comparable with the times of files
    ended_ns: int
    versions: dict[str, str]  # of those PACKAGES that the stage had loaded
    seconds: float
    gpus: list[str]  # names of the GPUs it used
    joules: float | None  # of all these GPUs, by their own counters; None where one does not count
    process_s: float | None = None  # CPU time, of its own processes too; None in lines written before it was recorded


@contextmanager
def log_run(stage: str, arguments: Sequence[str], gpus: list[int] | None) -> Iterator[None]:
    """Append a StageRun to the log when the block ends without an error.

    `gpus` are indices into CUDA_VISIBLE_DEVICES, None for all. A process that writes no outputs logs nothing: torchrun's
    ranks but the first, and a stage asked only to show something (`--preview`).
    """
    if os.environ.get("RANK", "0") != "0" or any(word.startswith("--") for word in arguments):
        yield
        return
    began, started, meter = time.time_ns(), time.perf_counter(), EnergyMeter(gpus)
    process_started = _read_process_seconds()
    yield
    process_s = round(_read_process_seconds() - process_started, 2)
    versions = {package: version(package) for package in PACKAGES if package in sys.modules}
    seconds = round(time.perf_counter() - started, 2)
    run = StageRun(stage, began, time.time_ns(), versions, seconds, meter.names(), meter.joules(), process_s)
    try:
        LOG_FILE.parent.mkdir(exist_ok=True)
        with LOG_FILE.open("a", encoding="utf-8") as log:
            # One short write, so that stages that end together do not mix their lines.
            log.write(json.dumps(asdict(run)) + "\n")
    except OSError as error:  # the results are whole; a full disk must not fail the stage for its log
        print(f"note: {LOG_FILE} not written ({error.strerror}): this run is not recorded", file=sys.stderr)


def _read_process_seconds() -> float:
    """Return the CPU time of this process, all its threads, and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def read_log() -> list[StageRun]:
    """Return the logged runs in their order. Lines that are cut or of another version are skipped."""
    try:
        with guarded_files.guard_parsing(LOG_FILE, "JSON", ""):
            lines = LOG_FILE.read_text(encoding="utf-8", errors="replace").splitlines()
    except guarded_files.BrokenArtifactError:
        return []
    runs, adapter = list[StageRun](), TypeAdapter(StageRun)
    for line in lines:
        with suppress(ValueError):
            runs.append(adapter.validate_json(line))
    return runs
