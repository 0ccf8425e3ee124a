"""Unfinished work is taken up by the very same work only, and forgotten once it is done."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from stages.formats import scratch


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_same_work_has_the_same_place_and_any_other_its_own() -> None:
    """Names, numbers and the order of inputs count; the order of keys in a section doesn't."""
    work = ("train_draft-e003", {"seed": 1, "lr": 0.1}, ["abc", "def"])
    assert scratch.place(*work) == scratch.place("train_draft-e003", {"lr": 0.1, "seed": 1}, ["abc", "def"])
    others = [
        ("train_draft-e009", *work[1:]),
        (work[0], {"seed": 2, "lr": 0.1}, work[2]),
        (work[0], {"seed": 1, "lr": 0.1, "more": None}, work[2]),
        (work[0], work[1], ["def", "abc"]),
        (work[0], work[1], ["abcdef"]),
        (work[0], work[1]),
    ]
    places = [scratch.place(*o) for o in [work, *others]]
    assert len(set(places)) == len(places)
    assert all(
        p.parent == Path(".scratch") and p.name.startswith(w[0] + "-")
        for p, w in zip(places, [work, *others], strict=True)
    )


def test_changed_code_takes_up_no_work_of_before_but_new_parameters_classes_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sections hold no values, so a new one must not throw half a night's training away."""
    (tmp_path / "sections").mkdir()
    for name in ("loss", "params", "sections/draft"):
        (tmp_path / f"{name}.py").write_text("a = 1")
        module = ModuleType(f"stages.{name}_of_a_test")
        module.__file__ = str(tmp_path / f"{name}.py")
        monkeypatch.setitem(sys.modules, module.__name__, module)
    before = scratch.place("train_draft-e003", 1)
    (tmp_path / "params.py").write_text("a = 2")
    (tmp_path / "sections/draft.py").write_text("a = 2")
    assert scratch.place("train_draft-e003", 1) == before
    (tmp_path / "loss.py").write_text("a = 2")
    assert scratch.place("train_draft-e003", 1) != before


def test_done_forgets_this_stage_only_with_what_killed_writers_left() -> None:
    """Bug: a folder left by a killed writer, `.train_draft-e003-….PID.part`, stayed once a parameter was edited."""
    work = scratch.place("train_draft-e003", 1)
    gone = [work, scratch.place("train_draft-e003", 2), work.with_name(f".{work.name}.77.part")]
    kept = [scratch.place("train_draft-e0030", 1), scratch.place("train_draft-e009", 1), work.with_name(".mine")]
    for folder in [*gone, *kept]:
        folder.mkdir(parents=True)
        (folder / "file").write_text("x")
    scratch.done(work)
    assert sorted(Path(".scratch").iterdir()) == sorted(kept)
    scratch.done(work)  # nothing to forget is no error


def test_the_digest_of_a_folder_is_of_names_and_bytes(tmp_path: Path) -> None:
    def digest(**files: str) -> str:
        home = (
            tmp_path / f"folder{len(list(tmp_path.iterdir()))}"
        )  # another folder each time: its own name doesn't count
        for name, text in files.items():
            (home / name.replace("__", "/")).parent.mkdir(parents=True, exist_ok=True)
            (home / name.replace("__", "/")).write_text(text)
        return scratch.digest(home)

    same = digest(a="1", deep__b="2")
    assert digest(deep__b="2", a="1") == same
    others = [digest(a="2", deep__b="1"), digest(a="1", b="2"), digest(a="1"), digest(a="12", deep__b=""), digest()]
    assert len({same, *others}) == 1 + len(others)
