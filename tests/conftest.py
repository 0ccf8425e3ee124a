"""Fixtures that many tests share: a copy of the project, and the whole pipeline run once on a small scale."""

import atexit
import fcntl
import gc
import io
import os
import pickle
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from ruamel.yaml import YAML

from stages.params.schema import load_params
from stages.telemetry import fork_server
from tests import warm_process


def _find_root() -> Path:
    """Return this checkout; where its params.yaml is edited, a folder of links to it with the committed one."""
    here = Path(__file__).parent.parent
    shipped = subprocess.run(["git", "show", "HEAD:params.yaml"], cwd=here, capture_output=True)
    if shipped.returncode or shipped.stdout == (here / "params.yaml").read_bytes():
        return here
    links = tempfile.TemporaryDirectory(prefix="aerie-tests-")
    atexit.register(links.cleanup)
    for entry in here.iterdir():
        (Path(links.name) / entry.name).symlink_to(entry)
    (Path(links.name) / "params.yaml").unlink()
    (Path(links.name) / "params.yaml").write_bytes(shipped.stdout)
    return Path(links.name)


ROOT = _find_root()

EAGLE3 = {
    "e003": {"from": "e000", "epochs": 3},
    "e009": {"from": "e003", "epochs": 6},
}  # train_draft.checkpoints of params.yaml
# Without `until`: of a fast machine's tiny cells the speedup is known sooner than on another.
EVAL = {**load_params(ROOT / "params.yaml").benchmark.workloads["eval"].model_dump(), "until": None}

# Products this small gain nothing by a second thread, and where two tests run at once they lose a hundred times as much:
# the threads wait for each other in turn. Before torch is imported, here and in what tests start.
os.environ["OMP_NUM_THREADS"] = "1"
# Hundreds of processes import this project's code: compiled once, where its copies take the byte code along.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.pop(
    "MAKELEVEL", None
)  # of `make test`: what is stopped goes on by `aerie run`, started by make by `make run`

WARM_PROCESS = os.environ.pop(warm_process.ADDRESS_VARIABLE, "")  # the address of that of this run

# What makes the whole graph run in a minute or two. `straight` is e001 and then e003 in one go.
SMALL = {
    "target": {"num_threads": 1},
    "sample_target": {"train_rows": 32, "eval_rows": 6, "max_new_tokens": 40},
    "check_overfit": {"steps": 60, "min_tau": 1.5},
    "train_draft": {
        "checkpoints": {
            "e001": {"from": "e000", "epochs": 1},
            "e003": {"from": "e001", "epochs": 2},
            "straight": {"from": "e000", "epochs": 3},
        },
        "horizon_epochs": 3,
    },
    "replay_trees": {
        "checkpoints": ["e003", "straight"],
        "num_steps": [1, 2, 3, 5, 8],
        "topk": [1, 2, 3],
        "num_draft_tokens": [4, 8, 16],
    },
    "time_cycles": {
        "num_steps": [1, 3, 6],
        "topk": [1, 2],
        "num_draft_tokens": [2, 4, 8],
        "context": 32,
        "cycles": 1,
        "repeats": 2,
    },
    "benchmark": {
        "workloads": {"eval": {**EVAL, "num_prompts": 6, "warmup": 0, "max_new_tokens": 40}},
        "checkpoints": ["e003"],
        "trees": ["t5_1_6", "t8_2_16", "t8_3_16"],
    },
    "benchmark_served": {"checkpoints": ["e003"]},
}

# The longest files: first those that wait most, for servers and workers; then by what they cost, and not two in a row
# that wait for small_run. Another order is only slower.
LONG = [
    "test_train_draft", "test_prefect_workers", "test_browser", "test_served_cycles", "test_flows", "test_block_proposer",
    "test_reruns", "test_real_server", "test_security", "test_run", "test_benchmark_served", "test_batch_decode",
    "test_dvc_graph", "test_import_draft", "test_recipes", "test_train_block_drafts", "test_sampled_drafts",
    "test_interrupted_runs", "test_dvc_remote", "test_bad_input", "test_sample_target", "test_sampling",
    "test_prepare_prompts", "test_beside_the_baseline", "test_extract_hiddens", "test_load_generator",
    "test_benchmark_loads", "test_decode", "test_printed_taus", "test_reproduce", "test_replay",
    "test_sample_pictures", "test_replay_blocks", "test_import_block_drafts", "test_in_a_browser",
    "test_workspaces", "test_costs", "test_values", "test_page", "test_benchmark", "test_check_overfit",
    "test_sharing", "test_pictured_stages", "test_full_disk", "test_names_and_shells", "test_freshness", "test_format",
    "test_multimodal_forward", "test_feature_layers", "test_target_forward", "test_block_stages",
    "test_verdicts",
]  # fmt: skip


def copy_project(to: Path) -> Path:
    """The files of the working tree, without what was made from them, as a DVC project of its own."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    for name in filter(None, listed):
        if (ROOT / name).is_file() and name != "dvc.lock" and not name.startswith("data/drafts/"):  # 20 MB
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    subprocess.run(["git", "init", "-q"], cwd=to, check=True)
    return to


def edit_params(project: Path, changes: dict) -> None:
    """Set the given keys of the project's params.yaml; what is not named stays, comments are lost: keeping them takes 0.2 s."""
    file = project / "params.yaml"
    params = parse_once(file.read_text(), YAML(typ="safe").load)
    for section, values in changes.items():
        params.setdefault(section, {}).update(values)
    written = [_write_section(pickle.dumps({name: keys})) for name, keys in params.items()]
    text = "".join(section for section, _ in written)
    PARSED[text] = pickle.dumps({name: keys for _, read in written for name, keys in pickle.loads(read).items()})
    file.write_text(text)


@lru_cache(maxsize=1024)
def _write_section(pickled: bytes) -> tuple[str, bytes]:
    """Write a section as YAML -> its text and what is read of it; each once, since of twenty a test edits one or two."""
    yaml, text = YAML(typ="safe"), io.StringIO()
    yaml.default_flow_style, yaml.sort_base_mapping_type_on_output, yaml.width = False, False, 400
    yaml.dump(pickle.loads(pickled), text)
    return text.getvalue(), pickle.dumps(YAML(typ="safe").load(text.getvalue()))


PARSED: dict[str, bytes] = {}  # by the text of a params.yaml


def parse_once(text: str, parse: Callable[[str], Any]) -> Any:
    """Parse each text of params.yaml once in this process: that is nine tenths of the time to load it, which each stage does."""
    if len(PARSED) > 500:
        PARSED.clear()
    if text not in PARSED:
        PARSED[text] = pickle.dumps(parse(text))
    return pickle.loads(PARSED[text])


def dvc(project: Path, *arguments: str, module: str = "dvc", **more: str) -> subprocess.CompletedProcess[str]:
    """Run dvc in the project, with the stages' `python` being this one; `more` is added to the environment."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **more}
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=project, env=env, capture_output=True, text=True
    )


def run_graph(project: Path, *stages: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the stages, or the whole graph, by the DVC of `aerie run`, which writes dvc.lock in a third of the time."""
    return dvc(project, "repro", *stages, module="pipeline.checked_dvc", **more)


def has_ended(pid: int, within_s: float = 60.0) -> bool:
    """Whether the process ends in time. A zombie has ended: where process 1 reaps nobody, as in many containers, it stays
    one for good if its parent went before it (bug of a test that took it for alive, seen in CI only).
    """
    until = time.monotonic() + within_s
    while True:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.05)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Collect no garbage while modules are imported, and never look at what they hold again.

    A process has a million objects of torch, transformers and 7,000 tests: each full collection would take 0.2 s, and loads
    that are measured begin and end with one.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """Let xdist's workers be forks of a process that has imported torch, the same from which stages fork."""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if is_worker or config.option.collectonly or not config.getoption("numprocesses", None):
        return
    stack = ExitStack()
    address = stack.enter_context(warm_process.start_fork_server())
    config.add_cleanup(stack.close)
    os.environ[warm_process.ADDRESS_VARIABLE] = address
    words = [sys.executable, str(ROOT / "tests/warm_process.py"), address]
    config.option.tx = [f"popen//python={shlex.join(words)}"] * len(config.option.tx)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long files come first, so that where files run in two processes neither waits long for the other's last."""
    rank = {name: at for at, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(LONG)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests of pages did not run: a machine without a browser otherwise passes in silence."""
    reasons = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    if count := sum("Chromium" in reason or "browser" in reason for reason in reasons):
        terminalreporter.write_line(f"{count} browser tests were skipped: install Chromium (apt-get install chromium)")


@pytest.fixture(scope="session", autouse=True)
def params_parsed_once() -> Iterator[None]:
    from stages.runtime import guarded_yaml

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guarded_yaml, "parse_yaml", partial(parse_once, parse=guarded_yaml.parse_yaml))
        yield


@pytest.fixture(scope="session")
def torch_server() -> Iterator[str]:
    """The address of a process that has imported torch, from which stages fork: 5 s of a core less for each start.

    One for all processes of a run. Without effect on a test that does not hand it to its stages, as `forked_stages` does.
    """
    if WARM_PROCESS:
        yield WARM_PROCESS
        return
    with warm_process.start_fork_server() as address:
        yield address


@pytest.fixture(scope="module")
def forked_stages(torch_server: str) -> Iterator[None]:
    """Let the stages that a file's tests start, `python -m stages.NAME`, fork. Not for tests of the start itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(fork_server.ADDRESS_VARIABLE, torch_server)
        yield


@contextmanager
def share_path(tmp_path_factory: pytest.TempPathFactory, name: str) -> Iterator[Path]:
    """A path that xdist's processes have in common, in the folder above their own, for the first of them to make something at.

    The others wait meanwhile.
    """
    base = tmp_path_factory.getbasetemp()
    path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield path


def make_for_all(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder `name` that `make` has filled, for all processes of this run; the others fail as the first did."""
    with share_path(tmp_path_factory, name) as folder:
        ended = folder.with_suffix(".log")
        if not ended.exists():
            folder.mkdir()
            try:
                make(folder)
            except BaseException:
                ended.write_text(traceback.format_exc())
                raise
            ended.write_text("")
    assert not ended.read_text(), ended.read_text()
    return folder


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory, torch_server: str) -> Path:
    """A copy of the project in which the whole graph has run, small. Read it; copy it before you change it."""

    def make(project: Path) -> None:
        edit_params(copy_project(project), SMALL)
        opened = project.with_suffix(".opened")  # which files each stage opens: tests/opened/watch.py
        opened.mkdir()
        more = {"AERIE_OPENED": str(opened), "PYTHONPATH": str(ROOT / "tests" / "opened")}
        done = run_graph(project, **more, **{fork_server.ADDRESS_VARIABLE: torch_server})
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"

    return make_for_all(tmp_path_factory, "small_run", make)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Products this small gain nothing by more, and on a busy machine lose a hundred times as much; stages set their own."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what recipes are made of, to be in."""
    for folder in ("recipes", "published"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for file in ("params.yaml", "dvc.yaml"):
        shutil.copy(ROOT / file, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def shared_talking_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests import talking

    project = tmp_path_factory.mktemp("talking")
    talking.make(project)
    return project


@pytest.fixture
def talking_project(shared_talking_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project of tests/talking.py, to be in and to write prompts and cells in."""
    for name in ("artifacts", "tiny", "drafts"):
        (tmp_path / name).symlink_to(shared_talking_project / name)
    (tmp_path / "data").mkdir()
    for name in ("sampled", "prompt_sets"):
        (tmp_path / "data" / name).symlink_to((shared_talking_project / "data" / name).resolve())
    (tmp_path / "params.yaml").write_text((shared_talking_project / "params.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    return tmp_path
