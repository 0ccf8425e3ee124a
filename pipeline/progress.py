"""A stage's output in Prefect's pages: log lines, and a progress artifact for a tqdm bar."""

import logging
import re
import time
from collections.abc import Callable
from typing import Any

from prefect.artifacts import create_progress_artifact, update_progress_artifact

from pipeline.dvc_output import PROGRESS_PATTERN

PROGRESS_INTERVAL_S = 3.0
# What Prefect's engines log of a state's end: its representation, and `NoneType: None` below that of a failed task. The
# state itself and its message are shown, and a stage's own log says the error.
ENGINE_LINES = ("Task run failed with ", "Finished in state ")


def hide_engine_lines() -> None:
    """Keep the lines of Prefect's engines that repeat states out of the logs of runs."""
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(lambda record: not str(record.msg).startswith(ENGINE_LINES))


class ProgressLog:
    """A log whose progress bar lines become a progress artifact, and nothing else."""

    def __init__(self, stage: str, log: Callable[[str], object]) -> None:
        self._key = re.sub(r"[^a-z0-9]+", "-", f"progress-{stage}".lower())
        self._stage, self._log = stage, log
        self._artifact: Any = None
        self._updated = float("-inf")

    def __call__(self, line: str) -> None:
        found = PROGRESS_PATTERN.search(line)
        if not found:
            self._log(line)
            return
        percent = float(found["percent"])
        if percent < 100 and time.monotonic() - self._updated < PROGRESS_INTERVAL_S:
            return
        self._updated = time.monotonic()
        description = f"{self._stage}: {found['counts']}"
        if self._artifact is None:
            self._artifact = create_progress_artifact(percent, key=self._key, description=description)
        else:
            update_progress_artifact(self._artifact, percent, description=description)
