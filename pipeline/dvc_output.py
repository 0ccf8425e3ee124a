"""The output of `dvc repro`: which stage begins, with which outcome, and what is worth a line.

DVC prints an outcome line before a stage's command prints anything, then the command's own lines, then its own again.
"""

import itertools
import re
from collections.abc import Callable, Iterable
from enum import StrEnum

from stages.telemetry.machine_errors import advise_less_memory


class Outcome(StrEnum):
    """DVC's three ways of bringing a stage up to date."""

    RAN = "ran"
    RESTORED = "restored"  # from the run-cache: the same command was run on the same inputs before
    UNCHANGED = "unchanged"


OUTCOME_LINES = {
    re.compile(r"Running stage '(.+)'"): Outcome.RAN,
    re.compile(r"Verifying data sources in stage: '(.+)'"): Outcome.RAN,  # put under DVC by `dvc add`, changed since
    re.compile(r"Stage '(.+)' is cached - skipping run"): Outcome.RESTORED,
    re.compile(r"(?:Stage )?'(.+)' didn't change, skipping"): Outcome.UNCHANGED,
}

# What says nothing: DVC's advice about git and remotes after each stage.
NOISE = (
    "To track the changes with git, run:",
    "git add ",
    "To enable auto staging, run:",
    "dvc config core.autostage true",
    "Use `dvc push` to send your updates to remote storage.",
)

# A line of tqdm: 45%|####  | 9/20 [00:10<00:12, 1.02row/s]
PROGRESS_PATTERN = re.compile(r"(?P<percent>\d+)%\|.*\| (?P<counts>\d.*)")

NOTICE = re.compile(r"(note|warning|WARNING|ERROR): ")  # by a stage or by DVC
# How DVC reports the failure of a stage with --keep-going, and at its end the failures of all.
FAILURE = re.compile(r"WARNING: failed to run: |WARNING: output '.+' does not exist")
CONCLUSION = "ERROR: failed to reproduce"
EXIT_STATUS = re.compile(rf"{CONCLUSION} '.+': failed to run: .+, exited with -?\d+")  # the stage has said why
# A stage without a last word of its own, where memory is short: by the kernel's SIGKILL, or by SIGABRT after a line of Rust's.
KILLED = re.compile(r"failed to run: python -m stages\.(?P<stage>\w+).*, exited with (?P<status>-9|137|-6|134)$")
NO_MEMORY = re.compile(r"memory allocation of \d+ bytes failed")
ERROR_PREFIX = "aerie: "
MAX_ERROR_LENGTH = 600


def find_error(lines: Iterable[str]) -> str | None:
    """Return on one line what a failed command's output says went wrong: a stage's `aerie: ...`, else its last line."""
    shown_lines = [line for line in lines if line.strip() and not PROGRESS_PATTERN.search(line)]
    messages = [line for line in shown_lines if not EXIT_STATUS.match(line)]
    joined = " ".join(" ".join(list_error_lines(shown_lines) or messages[-1:]).split())
    return joined[:MAX_ERROR_LENGTH] or None


def list_error_lines(lines: Iterable[str]) -> list[str]:
    """Return a stage's last own error, `aerie: ...` without the prefix: one line or more, up to DVC's own; empty without one."""
    output = list(lines)
    error_starts = [at for at, line in enumerate(output) if line.startswith(ERROR_PREFIX)]
    if not error_starts:
        return _explain_kill(output)
    rest = output[error_starts[-1] + 1 :]
    continuation = itertools.takewhile(lambda line: not (line.startswith("ERROR: ") or FAILURE.match(line)), rest)
    return [output[error_starts[-1]].removeprefix(ERROR_PREFIX), *continuation]


def _explain_kill(lines: list[str]) -> list[str]:
    """Return a line on a stage that was ended where memory was short; empty for any other failure."""
    if not (found := next(filter(None, map(KILLED.search, lines)), None)):
        return []
    advice = advise_less_memory(found["stage"])
    if found["status"] in ("-9", "137"):
        return [f"killed (SIGKILL), which the kernel does where memory is short (dmesg then says so); {advice}"]
    return [f"out of memory; {advice}"] if any(map(NO_MEMORY.search, lines)) else []


class DvcOutput:
    """A reader of the lines of one DVC process."""

    def __init__(
        self, stages: Iterable[str], begin: Callable[[str, Outcome], object], on_line: Callable[[str], object]
    ) -> None:
        """Call `begin` when one of the stages begins and `on_line` with each line that is neither empty nor noise."""
        self._waiting = set(stages)
        self._begin, self._on_line = begin, on_line

    def __call__(self, line: str) -> None:
        if found := self._match_outcome(line):
            self._waiting.discard(found[0])  # once: a stage may print such a line itself
            self._begin(*found)
        if line and not line.lstrip().startswith(NOISE):
            self._on_line(line)

    def _match_outcome(self, line: str) -> tuple[str, Outcome] | None:
        for pattern, outcome in OUTCOME_LINES.items():
            # In a folder other than the project's DVC puts `dvc.yaml:` before the name.
            if (found := pattern.match(line)) and (name := found[1].rpartition(":")[2]) in self._waiting:
                return name, outcome
        return None
