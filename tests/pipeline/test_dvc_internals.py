"""pipeline/dvc_internals.py: DVC's private functions are those of the version that it was written for."""

from pathlib import Path

from pipeline import dvc_graph, dvc_internals
from tests.pipeline.conftest import Project


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
