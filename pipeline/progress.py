"""A stage's output in Prefect's pages: log lines, and a progress artifact for a tqdm bar."""

import re
import time
from collections.abc import Callable
from typing import Any

from prefect.artifacts import create_progress_artifact, update_progress_artifact

from pipeline.dvc_output import PROGRESS_PATTERN

PROGRESS_INTERVAL_S = 3.0


class ProgressLog:
    """A log whose progress bar lines become a progress artifact; only a bar's last line is logged."""

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
        if percent == 100:
            self._log(line)
        elif time.monotonic() - self._updated < PROGRESS_INTERVAL_S:
            return
        self._updated = time.monotonic()
        description = f"{self._stage}: {found['counts']}"
        if self._artifact is None:
            self._artifact = create_progress_artifact(percent, key=self._key, description=description)
        else:
            update_progress_artifact(self._artifact, percent, description=description)
