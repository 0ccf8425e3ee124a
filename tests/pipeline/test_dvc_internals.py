"""pipeline/dvc_internals.py: DVC's private functions are those of the version that it was written for."""

import inspect
from importlib.metadata import version
from pathlib import Path

import pytest

from pipeline import dvc_graph, dvc_internals
from tests.pipeline.conftest import Project

EXPECTED_PARAMETERS = {
    "_can_hash": ["stage"],
    "_get_stage_hash": ["stage"],
    "StageCache._load": ["self", "stage"],
    "StageCache._create_stage": ["self", "cache", "wdir"],
}


@pytest.mark.parametrize("name", EXPECTED_PARAMETERS)
def test_dvc_has_each_private_function_with_the_expected_parameters(name: str) -> None:
    import dvc.stage.cache

    found = dvc.stage.cache
    for part in name.split("."):
        found = getattr(found, part, None)
    parameters = list(inspect.signature(found).parameters) if found else None
    assert parameters == EXPECTED_PARAMETERS[name], (
        f"dvc.stage.cache.{name} of DVC {version('dvc')} differs from DVC 3.67.1's: adapt pipeline/dvc_internals.py, or pin dvc"
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
