"""pipeline/dvc_internals.py: DVC's private functions are those of the version that it was written for."""

import inspect
from collections import OrderedDict
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from dvc.utils.serialize._yaml import _dump
from ruamel.yaml import YAML

from pipeline import dvc_graph, dvc_internals, recipes
from tests.conftest import dvc
from tests.pipeline.conftest import REPO, Project, give_params

EXPECTED_PARAMETERS = {
    "cache._can_hash": ["stage"],
    "cache._get_stage_hash": ["stage"],
    "cache.StageCache._load": ["self", "stage"],
    "cache.StageCache._create_stage": ["self", "cache", "wdir"],
    "run.cmd_run": ["stage", "dry", "run_env"],
    "Stage.save": ["self", "allow_missing", "run_cache"],
    "Stage.save_deps": ["self", "allow_missing"],
}


@pytest.mark.parametrize("name", EXPECTED_PARAMETERS)
def test_dvc_has_each_private_function_with_the_expected_parameters(name: str) -> None:
    import dvc.stage.cache
    import dvc.stage.run

    found: Any = dvc.stage
    for part in name.split("."):
        found = getattr(found, part, None)
    parameters = list(inspect.signature(found).parameters) if found else None
    assert parameters == EXPECTED_PARAMETERS[name], (
        f"dvc.stage.{name} of DVC {version('dvc')} differs from DVC 3.67.1's: adapt pipeline/dvc_internals.py and "
        "pipeline/input_snapshot.py, or pin dvc"
    )


def test_a_run_is_found_by_the_bytes_of_its_inputs(project: Project) -> None:
    dvc_graph.reproduce_stage("first", print)
    with dvc_graph.open_repo() as repo:
        (stage,) = repo.stage.collect("first")
        key = dvc_internals.compute_run_cache_key(stage)
        (entry,) = dvc_internals.locate_run_cache_entries(repo, key).iterdir()
        assert "first.csv" in entry.read_text()
        cached = dvc_internals.load_cached_run(repo, stage)
        assert [out.def_path for out in cached.outs] == ["first.csv"] and cached.outs_cached()
    Path("raw.csv").write_text("other\n")
    with dvc_graph.open_repo() as repo:
        (stage,) = repo.stage.collect("first")
        stage.save_deps()
        other = dvc_internals.compute_run_cache_key(stage)
        assert other != key and not dvc_internals.locate_run_cache_entries(repo, other).exists()
        assert dvc_internals.load_cached_run(repo, stage) is None


def test_a_stage_without_a_run_cache_is_refused_by_name(project: Project) -> None:
    text = Path("dvc.yaml").read_text()
    Path("dvc.yaml").write_text(
        text.replace("    outs: [first.csv]", "    always_changed: true\n    outs: [first.csv]")
    )
    with dvc_graph.open_repo() as repo:
        (stage,) = repo.stage.collect("first")
        with pytest.raises(ValueError, match="first can't be made elsewhere"):
            dvc_internals.compute_run_cache_key(stage)


VALUES = {
    "schema": "2.0",
    "stages": OrderedDict(
        a={"cmd": 'python -m stages.a "$DVC_STAGE"', "none": None, "list": [None, 1, 0.001, 1.5e-9, True, [], {}]},
        b={
            "text": ["x: y", "  lead", "yes", "1e3", "null", "", "#", "ü" * 50, "long " * 40, "\\"],
            "z": 1,
            "a": {"b": None},
        },
    ),
}


def test_libyaml_writes_the_bytes_that_dvc_writes() -> None:
    committed = YAML(typ="safe").load((REPO / "dvc.lock").read_text())
    for data in (VALUES, committed):
        ours, theirs = StringIO(), StringIO()
        dvc_internals.dump_with_libyaml(data, ours)
        _dump(data, theirs)
        assert ours.getvalue() == theirs.getvalue()
        assert YAML(typ="safe").load(ours.getvalue()) == data


@pytest.mark.parametrize(("kind", "expected"), [("safe", "{a: 1, b: null}\n"), ("rt", "b:\na: 1\n")])
def test_no_writer_changes_how_others_write_nulls(kind: str, expected: str, project: Project) -> None:
    """Bug: one process's lock file, then its recipe: `train_rows: null` became a string of 32 digits in the recipe."""
    give_params(project)
    dvc_internals.dump_with_libyaml({"a": None}, StringIO())
    recipes.write_sections({"report": {"title": "x"}})
    written = StringIO()
    YAML(typ=kind).dump({"b": None, "a": 1}, written)
    assert written.getvalue() == expected


def test_a_run_and_dvc_alone_write_the_same_lock_file(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    from dvc import dvcfile

    calls: list[Any] = []
    dump = dvc_internals.dump_with_libyaml
    monkeypatch.setattr(dvcfile, "modify_yaml", dvcfile.modify_yaml)  # back to DVC's after the test
    dvc_internals.use_libyaml_for_lock_file()
    monkeypatch.setattr(dvc_internals, "dump_with_libyaml", lambda *given: (calls.append(given), dump(*given)))
    with dvc_graph.open_repo() as repo:
        repo.reproduce()
    assert calls
    fast = Path("dvc.lock").read_text()
    Path("dvc.lock").unlink()
    assert dvc(project.root, "repro", "--force").returncode == 0
    assert Path("dvc.lock").read_text() == fast


def test_a_cut_list_of_locks_is_emptied(project: Project) -> None:
    """Bug: a full disk leaves it empty, and every command ended with "JSON structure is corrupted" for good."""
    dvc_graph.reproduce_stage("first", print)
    locks = Path(".dvc/tmp/rwlock")
    for text in ("", '{"write": {"first.csv":'):
        locks.write_text(text)
        dvc_graph.reproduce_stage("middle", print, force=True)
        locks.write_text(text)
        assert set(dvc_graph.explain_stale()) == {"last"} and "first.csv" not in locks.read_text()
    kept = '{"write": {"elsewhere.csv": {"pid": 1, "cmd": "dvc repro"}}, "read": {}}'
    locks.write_text(kept)
    dvc_internals.mend_lock_list()
    assert locks.read_text() == kept
