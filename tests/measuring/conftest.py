"""A project with what served cells need, and servers that decode, for every test of served cells."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.engines import server
from stages.runtime import free_port
from tests.conftest import ROOT, edit_params
from tests.engines.engine_double import FORK_VARIABLE
from tests.measuring.served_project import DOUBLE, LOAD


@pytest.fixture(scope="module")
def shared_project(small_run: Path, forked_doubles: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What served cells need, of a graph that ran: target, drafts, prompts, replays; and the double's code."""
    project = tmp_path_factory.mktemp("served")
    used = "artifacts drafts/e003 data/prompts data/prompt_sets results/replay stages tests/engines templates"
    for name in used.split():
        shutil.copytree(small_run / name, project / name)
    shutil.copytree(ROOT / "tests/engines", project / "tests/engines", dirs_exist_ok=True)
    for name in ("params.yaml", "tests/conftest.py"):
        shutil.copy(small_run / name, project / name)
    return project


@pytest.fixture(scope="module")
def forked_doubles(torch_server: str) -> Iterator[None]:
    """Servers fork, instead of importing torch for their first answer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FORK_VARIABLE, torch_server)
        yield


@pytest.fixture(scope="module")
def running_url(shared_project: Path) -> Iterator[str]:
    """The URL of a server of e003 and t5_1_6 that somebody else started."""
    port = free_port.find_free_port()
    draft = f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {shared_project}/drafts/e003/draft"
    tree = "--speculative-num-steps 5 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6"
    words = f"serve --model-path artifacts/target --port {port} {draft} {tree} --cuda-graph-max-bs-decode 8"
    line = [*DOUBLE, *words.split()]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(shared_project)
        patch.setenv("PYTHONPATH", str(shared_project))
        with server.ServerProcess("sglang", line, port, shared_project / "log", 60):
            yield f"http://127.0.0.1:{port}"


@pytest.fixture
def project(shared_project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the shared project with its own settings and without cells; it is the working directory."""
    monkeypatch.chdir(shared_project)
    monkeypatch.setenv("PYTHONPATH", str(shared_project))
    shutil.copy(ROOT / "params.yaml", shared_project)
    shutil.rmtree(shared_project / "results/cells", ignore_errors=True)
    edit_params(
        shared_project,
        {
            "target": {"num_threads": 1},
            "train_draft": {"checkpoints": {"e003": {"from": "e000", "epochs": 3}}},
            "replay_trees": {"checkpoints": ["e003"]},
            "benchmark": {"workloads": {"eval": LOAD}, "checkpoints": ["e003"]},
            "benchmark_served": {
                "workloads": ["eval"], "checkpoints": ["e003"], "trees": ["t5_1_6", "t8_2_16"],
                "servers": {
                    "sglang": {"command": [*DOUBLE, "serve"], "start_timeout_s": 60.0},
                    "vllm": {"command": [*DOUBLE, "vllm", "serve"], "start_timeout_s": 60.0},
                },
            },
        },
    )  # fmt: skip
    return shared_project
