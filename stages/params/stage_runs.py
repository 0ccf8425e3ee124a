"""The log of stage runs: which versions of torch and transformers a stage ran with. Neither a dep nor an out of any stage.

A line of logs/stages.jsonl is one run that ended well. No stage reads it; `python -m pipeline stale` compares it with the
versions installed now (pipeline/versions.py).
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

LOG = Path("logs/stages.jsonl")
PACKAGES = ("torch", "transformers")


@dataclass(frozen=True)
class StageRun:
    command: str  # as dvc.yaml has it behind `python -m`
    began_ns: int  # time.time_ns, which files' times are compared with
    ended_ns: int
    versions: dict[str, str]  # of PACKAGES, those that the stage has loaded


@contextmanager
def logged(arguments: list[str]) -> Iterator[None]:
    """Append a StageRun to the log when the block ends without an error; `arguments` are sys.argv.

    Nothing is logged of a process that makes no outputs of its own, nor of one that has loaded none of PACKAGES.
    """
    began, file, words = time.time_ns(), Path(arguments[0]), arguments[1:]
    yield
    versions = {package: version(package) for package in PACKAGES if package in sys.modules}
    if not versions or file.parent.name != "stages" or _is_helper(words):
        return
    command = " ".join([f"stages.{file.stem}", *words])
    line = json.dumps(asdict(StageRun(command, began, time.time_ns(), versions)))
    try:
        LOG.parent.mkdir(exist_ok=True)
        with LOG.open("a", encoding="utf-8") as log:
            log.write(f"{line}\n")  # one write of a short line: stages that end together don't mix theirs
    except OSError as error:  # the stage's results are whole; a full disk must not fail it for a log
        print(f"note: {LOG} not written ({error.strerror}): this run's versions are not recorded", file=sys.stderr)


def _is_helper(words: list[str]) -> bool:
    """torchrun's processes but the first, and one that only shows something (`--preview`)."""
    return os.environ.get("RANK", "0") != "0" or any(word.startswith("--") for word in words)


def read() -> list[StageRun]:
    """Return the logged runs in their order; lines that are cut or of another version are skipped."""
    try:
        lines = LOG.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return [run for line in lines if (run := _parse(line)) is not None]


def _parse(line: str) -> StageRun | None:
    try:
        return StageRun(**json.loads(line))
    except (ValueError, TypeError):
        return None
