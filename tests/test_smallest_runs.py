"""The smallest runs that a user can write, through every stage to the page: the real dvc.yaml, DVC and stages."""

import importlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import dvc.stage.run
import polars as pl
import pytest

from stages.cells.replay_records import GroupTau
from stages.reporting.summary import PAGE_FILE
from stages.telemetry.run_stage import split_stage_name
from tests.conftest import EVAL, edit_params
from tests.engines.engine_double import FORK_VARIABLE
from tests.measuring.served_project import DOUBLE
from tests.recorded_graph import Recorder

ONE_PROMPT = {**EVAL, "num_prompts": 1, "warmup": 0, "max_new_tokens": 8}
BENCHMARK = {"workloads": {"eval": ONE_PROMPT}, "torch_workloads": ["eval"], "trees": ["t3_1_4"]}
REPLAY = {"num_steps": [3], "topk": [1], "num_draft_tokens": [4]}
TIMES = {"num_steps": list(range(1, 9)), "topk": [1], "num_draft_tokens": [4], "cycles": 1, "repeats": 1, "context": 16}
UNTRAINED = {"init_draft": {"checkpoints": []}, "train_draft": {"checkpoints": {}}}
LOOKUP = {"import_draft": {"checkpoints": {"lookup": {"model": "builtin/ngram"}}}}


def build_run(name: str, replayed: bool = True, timed: str = "", **sections: Any) -> dict[str, Any]:
    """Return sections of params.yaml with one checkpoint, one workload and one tree."""
    found: dict[str, Any] = {
        "train_draft": {"checkpoints": {"e001": {"from": "e000", "epochs": 1}}},
        "replay_trees": {**REPLAY, "checkpoints": [name] if replayed else []},
        "time_cycles": {**TIMES, "checkpoints": [timed] if timed else []},
        "benchmark": {**BENCHMARK, "checkpoints": [name]},
        "benchmark_served": {"workloads": [], "checkpoints": [name]},
    }
    return found | {section: found.get(section, {}) | keys for section, keys in sections.items()}


SERVER = {"command": [*DOUBLE, "serve"], "start_timeout_s": 60.0}
SERVED = {"workloads": ["eval"], "trees": ["t3_1_4"], "servers": {"sglang": SERVER}}
PUBLISHED = {"import_draft": {"checkpoints": {"pub": {"model": "published_draft"}}}}
RUNS = {
    "one checkpoint": build_run("e001", timed="e000"),
    "one imported": build_run("pub", timed="pub", **UNTRAINED, **PUBLISHED),
    "none replayed": build_run("lookup", replayed=False, **UNTRAINED, **LOOKUP, benchmark={"trees": ["n2_1_4"]}),
    "one answer": build_run(
        "e001", sample_target={"train_rows": 1, "eval_rows": 1}, check_overfit={"min_tau": 1.0, "steps": 2}
    ),
    "a served engine alone": build_run(
        "e001", replayed=False, benchmark={"torch_workloads": []}, benchmark_served=SERVED
    ),
}


class StageCaller(Recorder):
    """Calls a stage's `main` where DVC would start a process."""

    def __call__(self, stage: Any, dry: bool = False, run_env: Any = None) -> None:
        self.ran.append(stage.addressing)
        main = importlib.import_module(f"stages.{stage.cmd.split('stages.')[1].split()[0]}").main
        main(*split_stage_name([stage.addressing] if "@" in stage.addressing else []))


@pytest.fixture(scope="module")
def copied_run(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the small run; each test finds what those before have made, as a user who edits params.yaml does."""
    project = tmp_path_factory.mktemp("smallest") / "project"
    shutil.copytree(small_run, project, symlinks=True, copy_function=shutil.copy2)
    shutil.copytree(project / "drafts/e003/draft", project / "published_draft")
    return project


@pytest.fixture
def run_all(
    small_run: Path, copied_run: Path, tmp_path_factory: pytest.TempPathFactory, torch_server: str
) -> Iterator[Callable[[dict[str, Any]], set[str]]]:
    """What brings every stage up to date with these sections of params.yaml, and returns the stages that ran."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path_factory.mktemp("site")))
        patch.setenv("PYTHONPATH", str(copied_run))
        patch.setenv(FORK_VARIABLE, torch_server)
        caller = StageCaller()
        patch.setattr(dvc.stage.run, "cmd_run", caller)

        def run(sections: dict[str, Any]) -> set[str]:
            shutil.copy(small_run / "params.yaml", copied_run)
            edit_params(copied_run, sections)
            return caller.repro(copied_run)

        yield run


@pytest.mark.parametrize("name", RUNS)
def test_the_smallest_runs_end_in_a_page(name: str, copied_run: Path, run_all: Callable[..., set[str]]) -> None:
    """Bug: with one checkpoint the page's last template failed ('dict object' has no attribute 'taus'), so after hours of
    work there was no page; and a run that replays nothing could not be written.
    """
    assert "report" in run_all(RUNS[name])
    page = (copied_run / PAGE_FILE).read_text()
    assert "</html>" in page and RUNS[name]["benchmark"]["checkpoints"][0] in page
    verdict = json.loads((copied_run / "results/metrics.json").read_text())["verdict"]
    assert verdict["text"]


def test_one_replay_has_tau_of_each_eval_file(copied_run: Path, run_all: Callable[..., set[str]]) -> None:
    """Train on one file, and compare the draft on others, named by a file and a pattern, in one run."""
    lines = (copied_run / "data/raw/weather_toon.jsonl").read_text().splitlines(keepends=True)
    (copied_run / "data/own").mkdir()
    for name, part in {"a": lines[:60], "b1": lines[60:80], "b2": lines[80:100], "c": lines[100:120]}.items():
        (copied_run / f"data/own/{name}.jsonl").write_text("".join(part))
    files = {"raw": "data/own", "eval_file": ["b*", "c.jsonl"]}
    gate = {"min_tau": 1.0, "steps": 2}
    few = {"train_rows": 8, "eval_rows": 6}
    ran = run_all(build_run("e001", timed="e000", fix_data=files, sample_target=few, check_overfit=gate))
    assert "replay_trees@e001" in ran
    with chdir(copied_run):
        groups = GroupTau.read("e001")
    taus = {row.group: row for row in groups if row.by == "source"}
    assert set(taus) == {"b1.jsonl", "b2.jsonl", "c.jsonl"}
    assert {row.answers for row in taus.values()} == {2} and all(row.tau >= 1 for row in taus.values())
    trained = pl.read_parquet(copied_run / "data/fixed/train.parquet", columns=["source"])["source"]
    assert set(trained) == {"a.jsonl"}
    page = (copied_run / PAGE_FILE).read_text()
    assert all(name in page for name in taus)
