"""The journal: what was added is there after any kill, once, under the key of what was asked."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.runtime.journal import Journal

ROOT = Path(__file__).parents[2]


def test_a_cut_at_any_byte_loses_at_most_one_entry(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path) as journal:
        for n in range(3):
            journal.add(str(n), {"n": n, "é": "1"})
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        with Journal(path) as journal:
            assert list(journal.done) == [str(n) for n in range(whole[:cut].count(b"\n"))]
            journal.add("new", cut)
        with Journal(path) as journal:
            assert journal.done["new"] == cut


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b'["a",1]\n["b",\n["c",3]\n')
    with pytest.raises(
        ValueError, match=r"journal line 2 is not a whole piece of work.*Remove it, it holds unfinished work"
    ):
        Journal(path)


def test_killed_writers_lose_no_finished_entry(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    writes = (
        "import sys; from pathlib import Path; from stages.runtime.journal import Journal\n"
        "j = Journal(Path(sys.argv[1])); n = len(j.done)\n"
        "while True:\n    j.add(str(n), 'x' * 500); print(n, flush=True); n += 1"
    )
    last_printed = -1
    for turn in range(5):
        with (tmp_path / f"said{turn}").open("w") as out:
            writer = subprocess.Popen([sys.executable, "-c", writes, str(path)], cwd=ROOT, stdout=out)
            while not (tmp_path / f"said{turn}").stat().st_size:
                time.sleep(0.01)
            time.sleep(random.Random(turn).random() / 20)
            os.kill(writer.pid, signal.SIGKILL)
            writer.wait()
        last_printed = max([last_printed, *(int(x) for x in (tmp_path / f"said{turn}").read_text().split("\n")[:-1])])
    with Journal(path) as journal:
        assert list(journal.done) == [str(n) for n in range(len(journal.done))]
        assert len(journal.done) > last_printed >= 5
