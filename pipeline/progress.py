"""What a stage says, as Prefect's pages show it: a log, and a bar where it draws one in a terminal."""

import re
import time
from collections.abc import Callable
from typing import Any

from prefect.artifacts import create_progress_artifact, update_progress_artifact

PROGRESS_PATTERN = re.compile(
    r"(?P<percent>\d+)%\|.*\| (?P<told>\d.*)"
)  # a line of tqdm: 45%|####  | 9/20 [00:10<00:12, 1.02row/s]
PROGRESS_INTERVAL_S = 3.0  # seconds


class ProgressLog:
    """Lines of a log; those of a progress bar become a bar in the pages, and only its last is logged."""

    def __init__(self, stage: str, log: Callable[[str], object]) -> None:
        self._key = re.sub(r"[^a-z0-9]+", "-", f"progress-{stage}".lower())
        self._stage, self._log = stage, log
        self._artifact: Any = None
        self._told = float("-inf")

    def __call__(self, line: str) -> None:
        found = PROGRESS_PATTERN.search(line)
        if not found:
            self._log(line)
            return
        percent = float(found["percent"])
        if percent == 100:
            self._log(line)
        elif time.monotonic() - self._told < PROGRESS_INTERVAL_S:
            return
        self._told = time.monotonic()
        about = f"{self._stage}: {found['told']}"
        if self._artifact is None:
            self._artifact = create_progress_artifact(percent, key=self._key, description=about)
        else:
            update_progress_artifact(self._artifact, percent, description=about)
