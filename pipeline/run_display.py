"""A run as a person sees it: a line for each stage that has ended, notes and warnings at once, the rest in logs/STAGE.log."""

import re
import sys
import time
from collections import Counter, deque
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, TextIO, cast

from pipeline.dvc_output import CONCLUSION, FAILURE, NOTICE, PROGRESS_PATTERN, Outcome, list_error_lines
from stages.params.units import format_duration
from stages.telemetry.interruption import escape_controls

LOGS_FOLDER = Path("logs")
TAIL_LINES = 30  # of the log of a stage that failed
PROGRESS_INTERVAL_S = 30.0  # between lines on how far a stage is, where there is no terminal
OF_DVC = re.compile(r"> |Running stage |Updating lock file |Generating lock file |Verifying ")
REFRESH_PER_S = 1  # of the bar; it must cost a timed stage nothing


class RunDisplay:
    """Takes the events and lines of one DVC process; as a context manager, since a bar and a log are open meanwhile."""

    def __init__(self, stages: Collection[str], has_bar: bool = True) -> None:
        """Without `has_bar`, beside other displays, lines say how far a stage is, as where there is no terminal."""
        self.counts: Counter[Outcome] = Counter()
        self.failed: list[str] = []
        self._width = max(map(len, stages), default=0)
        self._bar = _open_bar(len(stages)) if has_bar and sys.stdout.isatty() else None
        self._stage: str | None = None
        self._outcome = Outcome.UNCHANGED
        self._log: TextIO | None = None
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._has_failed = self._concluded = False
        self._since = self._told = 0.0
        self._progress = ""
        self._notices: set[str] = set()

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()
        self._close_log()

    def begin(self, stage: str, outcome: Outcome) -> None:
        """End the stage before and begin this one."""
        self._end()
        self._stage, self._outcome, self._since, self._has_failed = stage, outcome, time.monotonic(), False
        self._progress = ""
        self._tail.clear()
        if outcome == Outcome.RAN:
            try:
                LOGS_FOLDER.mkdir(exist_ok=True)
                self._log = locate_log(stage).open("w", encoding="utf-8", buffering=1)
            except OSError as error:
                self._give_up_log(error)
        if self._bar:
            self._bar.update(self._bar.task_ids[0], description=stage)

    def show(self, line: str) -> None:
        """Write a line to the running stage's log; show it if it is a note or a warning, or of no stage."""
        line = escape_controls(line)  # DVC's, with names of files; the log is read in a terminal too
        if found := PROGRESS_PATTERN.search(line):
            if self._bar:
                self._bar.update(self._bar.task_ids[0], description=f"{self._stage} {found['percent']}%")
            else:
                self._progress = f", {line[: found.start()].strip(' :')} {found['percent']}%, {found['counts']}"
                self.tell()
            if found["percent"] != "100":
                return
        self._tail.append(line)
        try:
            if self._log:
                self._log.write(f"{line}\n")
        except OSError as error:
            self._give_up_log(error)
        if self._stage is None:
            self._print(line)
        elif line.startswith(CONCLUSION):
            self._concluded = True
            if f"{self._stage}'" in line:
                self._has_failed = True
            else:  # with --keep-going, of stages before this one
                self._print(line)
        elif FAILURE.match(line):
            self._has_failed = True
        elif NOTICE.match(line) and line not in self._notices:  # each once; the logs of later stages have it too
            self._notices.add(line)
            self._print(f"{self._stage}: {line}")

    def tell(self) -> None:
        """Print how far the stage is, once in PROGRESS_INTERVAL_S: without a terminal there is no bar to look at."""
        now = time.monotonic()
        is_at_work = self._stage is not None and self._outcome == Outcome.RAN and not self._bar
        if is_at_work and now - max(self._since, self._told) >= PROGRESS_INTERVAL_S:
            self._told = now
            self._print(f"{self._stage}: at work for {format_duration(now - self._since)}{self._progress}")

    def finish(self, status: int) -> None:
        """End the last stage; it is the one that failed if DVC failed, or was killed, and did not name others."""
        self._has_failed |= bool(status) and not self._concluded
        self._end()

    def _end(self) -> None:
        """Print the line of the stage that has ended; if it failed, its own error, or without one the end of its log."""
        if self._stage is None:
            return
        self._close_log()
        self.counts[self._outcome] += 1
        duration = format_duration(time.monotonic() - self._since)
        if self._has_failed:
            self.failed.append(self._stage)
            error = list_error_lines(self._tail)
            where = "" if error else f"; the end of {locate_log(self._stage)}"
            self._print(f"{self._stage:<{self._width}}   failed after {duration}{where}:")
            self._print("\n".join(f"  {line}" for line in error or self._tail), error=True)
        elif self._outcome == Outcome.RAN:
            self._print_outcome(duration)
        elif self._outcome == Outcome.RESTORED:
            self._print_outcome("restored")
        if self._bar:
            self._bar.advance(self._bar.task_ids[0])
        self._stage = None

    def _print_outcome(self, how: str) -> None:
        """Print the line of a stage that went well, with the last line that it printed itself."""
        own = [
            line
            for line in self._tail
            if line.strip() and not (OF_DVC.match(line) or NOTICE.match(line) or PROGRESS_PATTERN.search(line))
        ]
        words = own[-1].removeprefix(f"{self._stage}: ") if own and self._outcome == Outcome.RAN else ""
        self._print(f"{self._stage:<{self._width}} {how:>12}   {words}".rstrip())

    def _give_up_log(self, error: OSError) -> None:
        """Go on without the log: a full disk must stop the stage by its own error, with its own message."""
        self._print(f"note: {locate_log(str(self._stage))} not written ({error.strerror})")
        self._close_log()

    def _close_log(self) -> None:
        log, self._log = self._log, None
        with suppress(OSError):  # what was not written when the disk was full; said already
            if log:
                log.close()

    def _print(self, text: str, error: bool = False) -> None:
        if self._bar:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr if error else sys.stdout, flush=True)


def show_line(line: str) -> None:
    """Print a line of a stage; a bar's line over the one before on a terminal, and only its last line into a file."""
    found = PROGRESS_PATTERN.search(line)
    is_drawn = found is not None and found["percent"] != "100"
    if not is_drawn or sys.stdout.isatty():
        print(line, end="\r" if is_drawn else "\n", flush=True)


def locate_log(stage: str) -> Path:
    """Return the file with everything that a stage printed in its last run."""
    return LOGS_FOLDER / f"{stage.replace('/', '_')}.log"


class _Unfiltered:
    """A stream of filter_terminal that a bar may move the cursor of; lines above it are escaped by RunDisplay.show."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return type(self._stream).write(self._stream, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _open_bar(total: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # 0.1 s

    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = Console(file=cast(IO[str], _Unfiltered(sys.stdout)))
    bar = Progress(*columns, console=console, transient=True, refresh_per_second=REFRESH_PER_S)
    bar.add_task("", total=total)
    return bar
