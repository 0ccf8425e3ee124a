"""A reader finds the old or the new, whole: after an error, after SIGKILL at any line, and through DVC's hard links."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stages.runtime import atomic

ROOT = Path(__file__).parents[2]
LENGTH = 50_000  # words in a file: enough that it takes several writes


def names(folder: Path) -> list[str]:
    """Everything below a folder, hidden names too."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def write_folder(path: Path, **files: str) -> None:
    with atomic.write_folder(path) as new:
        for name, text in files.items():
            (new / name).write_text(text)


# --- files ----------------------------------------------------------------------------------------------------------


# --- folders --------------------------------------------------------------------------------------------------------


def test_where_two_folders_can_not_swap_in_one_step_the_new_one_still_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other systems than Linux, and network disks."""
    monkeypatch.setattr(atomic.ctypes, "CDLL", lambda *_, **__: object())
    for text in ("old", "new", "newer"):
        write_folder(tmp_path / "out", a=text)
    assert names(tmp_path) == ["out", "out/a"] and (tmp_path / "out" / "a").read_text() == "newer"


def test_bytes_and_names_are_on_disk_before_they_take_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a folder's files were fsynced and the folder itself was not, so a power cut could leave it without them."""
    seen: list[str] = []
    fsync, replace = os.fsync, os.replace

    def spy_fsync(descriptor: int) -> None:
        seen.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def spy_replace(old: Path, new: Path) -> None:
        seen.append(f"{old.name} -> {new.name}")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    write_folder(tmp_path / "out", a="x")
    part = f".out.{os.getpid()}.part"
    assert seen == ["a", part, f"{part} -> out", tmp_path.name]


# --- leftovers of the killed ----------------------------------------------------------------------------------------


@pytest.fixture
def dead() -> int:
    """The id of a process that is no more."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_what_is_not_a_leftover_of_this_place_stays(tmp_path: Path, dead: int) -> None:
    """A living writer's temporary (process 1 lives), another path's, and a user's own hidden files."""
    kept = f".out.1.part .out2.{dead}.part .out.json.{dead}.part .out.backup .out.{dead}.part.gz .outx".split()
    for name in kept:
        (tmp_path / name).write_text("mine")
    atomic.write_text(tmp_path / "out", "new")
    assert names(tmp_path) == sorted([*kept, "out"])


# --- JSON -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_no_nan_is_written_and_the_old_file_stays(tmp_path: Path, number: float) -> None:
    path = tmp_path / "metrics.json"
    atomic.write_json(path, {"tau": 1.0})
    with pytest.raises(ValueError, match=r"metrics\.json not written: expected finite numbers, found NaN or infinity"):
        atomic.write_json(path, {"cells": [{"tau": number}]})
    assert json.loads(path.read_text()) == {"tau": 1.0} and names(tmp_path) == ["metrics.json"]


# --- SIGKILL --------------------------------------------------------------------------------------------------------

# Writes version after version of a file and a folder; each says which version it is in every word. With `forks` as its
# second argument it reads numbers, and for each a fork writes one version and kills itself before it runs that line of
# atomic.py (counted as run); it says the fork's exit code.
WRITER = f"""
import os, signal, sys
from pathlib import Path
from stages.runtime import atomic

home, last_line, lines = Path(sys.argv[1]), 0, 0

def trace(frame, event, argument):
    global lines
    if not frame.f_code.co_filename.endswith("runtime/atomic.py"):
        return None
    lines += event == "line"
    if lines >= last_line:
        os.kill(os.getpid(), signal.SIGKILL)
    return trace

def write(version):
    text = f"{{version}} " * {LENGTH}
    atomic.write_text(home / "file", text)
    with atomic.write_folder(home / "folder") as new:
        for name in ("a", "b"):
            (new / name).write_text(text)

if sys.argv[2] == "forks":
    for last_line in map(int, sys.stdin):
        if (fork := os.fork()) == 0:
            sys.settrace(trace)
            write(1)
            sys.exit()
        print(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), flush=True)
    sys.exit()
version = 1
while True:
    write(version)
    print(version, flush=True)
    version += 1
"""


def start(home: Path, how: str) -> subprocess.Popen:
    command = [sys.executable, "-c", WRITER, str(home), how]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)


def version_of(path: Path) -> int:
    """Which version a file is; fails where it is not one, whole."""
    words = path.read_text().split(" ")
    assert len(words) == LENGTH + 1 and len(set(words[:-1])) == 1 and words[-1] == "", f"{path} is torn"
    return int(words[0])


def versions(home: Path) -> tuple[int, int]:
    """The file's and the folder's version; fails where the folder mixes two."""
    inside = {version_of(path) for path in (home / "folder").iterdir()}
    assert len(inside) == 1 and names(home / "folder") == ["a", "b"]
    return version_of(home / "file"), inside.pop()


def first_version(home: Path) -> None:
    text = "0 " * LENGTH
    atomic.write_text(home / "file", text)
    write_folder(home / "folder", a=text, b=text)


def test_killed_before_any_line_of_it_a_write_leaves_old_or_new(tmp_path: Path) -> None:
    """Bug: the old folder was moved aside before the new one came; a kill between left nothing to resume from.

    Found by killing before every line in turn; a kill at a random moment would seldom meet those two.
    """
    first_version(tmp_path)
    found = []
    with start(tmp_path, "forks") as process:
        assert process.stdin and process.stdout
        for line in range(1, 200):
            process.stdin.write(f"{line}\n")
            code = int(process.stdout.readline())
            found.append(versions(tmp_path))
            if code == 0:
                break
            assert code == -signal.SIGKILL
            first_version(tmp_path)
            assert names(tmp_path) == ["file", "folder", "folder/a", "folder/b"]  # and no leftover
    # Old, then the file new, then both: each for a while, so all stages of a write were met.
    assert sorted(set(found)) == [(0, 0), (1, 0), (1, 1)] and found == sorted(found) and len(found) > 20
    assert found.count((1, 1)) > 1, "no kill after the swap"
