"""pipeline/dvc_internals.py: DVC's private functions are those of the version that it was written for."""

import inspect
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from pipeline import dvc_graph, dvc_internals
from tests.pipeline.conftest import Project

EXPECTED_PARAMETERS = {
    "cache._can_hash": ["stage"],
    "cache._get_stage_hash": ["stage"],
    "cache.StageCache._load": ["self", "stage"],
    "cache.StageCache._create_stage": ["self", "cache", "wdir"],
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
        f"dvc.stage.{name} of DVC {version('dvc')} differs from DVC 3.67.1's: adapt pipeline/dvc_internals.py, or "
        "pin dvc"
    )


def test_a_run_is_found_by_the_bytes_of_its_inputs(project: Project) -> None:
    dvc_graph.reproduce_stage("first", print)
    with dvc_graph.open_repo() as repo:
        (stage,) = repo.stage.collect("first")
        key = dvc_internals.compute_run_cache_key(stage)
        cached = dvc_internals.load_cached_run(repo, stage)
        assert [out.def_path for out in cached.outs] == ["first.csv"] and cached.outs_cached()
    Path("raw.csv").write_text("other\n")
    with dvc_graph.open_repo() as repo:
        (stage,) = repo.stage.collect("first")
        stage.save_deps()
        assert dvc_internals.compute_run_cache_key(stage) != key
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


def test_a_cut_list_of_locks_is_emptied(project: Project) -> None:
    """Bug: a full disk leaves it empty, and every command ended with "JSON structure is corrupted" for good."""
    dvc_graph.reproduce_stage("first", print)
    locks = Path(".dvc/tmp/rwlock")
    for text in ("", '{"write": {"first.csv":'):
        locks.write_text(text)
        Path("middle.csv").unlink(missing_ok=True)
        dvc_graph.reproduce_stage("middle", print)
        locks.write_text(text)
        assert set(dvc_graph.explain_stale()) == {"last"} and "first.csv" not in locks.read_text()
    kept = '{"write": {"elsewhere.csv": {"pid": 1, "cmd": "dvc repro"}}, "read": {}}'
    locks.write_text(kept)
    dvc_internals.mend_lock_list()
    assert locks.read_text() == kept
