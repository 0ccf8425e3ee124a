"""The journal: what was added is there after any kill, once, under the key of what was asked."""

from contextlib import closing
from pathlib import Path

import pytest

from stages.runtime.journal import Journal

ROOT = Path(__file__).parents[2]


def test_a_cut_at_any_byte_loses_at_most_one_entry(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with closing(Journal(path)) as journal:
        for n in range(3):
            journal.add(str(n), {"n": n, "é": "1"})
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        with closing(Journal(path)) as journal:
            assert list(journal.done) == [str(n) for n in range(whole[:cut].count(b"\n"))]
            journal.add("new", cut)
        with closing(Journal(path)) as journal:
            assert journal.done["new"] == cut


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b'["a",1]\n["b",\n["c",3]\n')
    with pytest.raises(
        ValueError, match=r"journal line 2 is not a whole piece of work.*Remove it, it holds unfinished work"
    ):
        Journal(path)
