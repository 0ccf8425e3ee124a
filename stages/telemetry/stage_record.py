"""What a stage took, `results/spent/<stage>.json`: written by the stage, shown by the report. Cells hold their own."""

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stages.runtime import atomic
from stages.telemetry.gpu_energy import EnergyMeter

RECORDS_FOLDER = Path("results/spent")


def locate_record(stage: str, *words: str) -> Path:
    return RECORDS_FOLDER / f"{'-'.join([stage, *words])}.json"


def record_stage(
    main: Callable[..., None], stage: str, which: Callable[[], list[int] | None] = list
) -> Callable[..., None]:
    """`main`, which afterwards leaves a record of its seconds and, of the GPUs `which` it used, their names and joules.

    Of the process that finished: what a killed one before it did isn't in it. One that is asked to show something
    (`--preview`) and one that only helps another (torchrun's all but the first) leave none.
    """

    @functools.wraps(main)
    def run(*words: str) -> None:
        meter, started = EnergyMeter(which()), time.perf_counter()
        main(*words)
        if os.environ.get("RANK", "0") == "0" and not any(word.startswith("--") for word in words):
            atomic.write_json(
                locate_record(stage, *words), {"seconds": round(time.perf_counter() - started, 2), **read_meter(meter)}
            )

    return run


def read_meter(meter: EnergyMeter) -> dict[str, Any]:
    """The GPUs' part of a record: both empty on a machine without any."""
    return {"gpus": meter.names(), "joules": meter.joules()}


def read_record(stage: str, *words: str) -> dict[str, Any]:
    """Raises ValueError naming the file and what to run, where it is missing or not whole."""
    place, name = locate_record(stage, *words), "@".join([stage, *words])
    found: dict[str, Any] = atomic.read_json(place, made_by=name)
    if not isinstance(found, dict) or set(found) != {"seconds", "gpus", "joules"}:
        raise ValueError(f"{place} is no record of what a stage took; run: dvc repro -f -s {name}")
    return found
