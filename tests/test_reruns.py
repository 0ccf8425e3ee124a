"""What reruns: edit one thing in a finished project, and see which stages wake. docs/reruns.md says the same in prose.

The graph is the real dvc.yaml, untouched, and DVC is the real DVC. Only the work is not: in place of each command we
note its stage and write outputs that are a digest of all the stage is declared to depend on. So an edit wakes what it
wakes in the worst case: where the stage's real output would not change, DVC stops earlier.
"""

import hashlib
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import dpath
import dvc.output
import dvc.rwlock
import dvc.stage.run
import pytest
from dvc.exceptions import ReproductionError
from dvc.repo import Repo, lock_repo
from dvc.utils import strictyaml
from dvc.utils.serialize import _yaml
from fsspec.implementations.memory import MemoryFileSystem
from ruamel.yaml import YAML

from stages.params.schema import load_params
from tests.conftest import EVAL

REPO = Path(__file__).resolve().parents[1]

# Lists short enough for a test, and not what a user has made of params.yaml today.
BASE = {
    "fix_data": {"raw": "data/raw/rows.jsonl"},
    "target": {"model": "local/mine", "watch": "local/mine"},
    "train_draft": {"checkpoints": {"e003": {"from": "e000", "epochs": 3}, "e009": {"from": "e003", "epochs": 6}}},
    "import_draft": {"checkpoints": {}},
    "replay_trees": {"checkpoints": ["e003", "e009"]},
    "benchmark": {
        "workloads": {"eval": {**EVAL, "num_prompts": 12}},
        "torch_workloads": ["eval"],
        "checkpoints": ["e003", "e009"],
        "trees": ["t5_2_8"],
    },
    "benchmark_served": {"workloads": ["eval"], "checkpoints": ["e009"], "trees": ["t5_1_6"]},
}


def sets(**sections: Any) -> Callable[[Path], None]:
    """An edit of params.yaml: what is given, merged in; a function makes the new value from the old one."""

    def merge(old: Any, new: Any) -> Any:
        if isinstance(new, dict) and isinstance(old, dict):
            return old | {key: merge(old.get(key), value) for key, value in new.items()}
        return new(old) if callable(new) else new

    def edit(root: Path) -> None:
        yaml = YAML(typ="safe")
        path = root / "params.yaml"
        params = merge(yaml.load(path), sections)
        yaml.dump(params, path)
        load_params(path)

    return edit


def comments(name: str) -> Callable[[Path], None]:
    """A comment added to a file."""

    def edit(root: Path) -> None:
        with (root / name).open("a", encoding="utf-8") as file:
            file.write("# a remark\n")

    return edit


def adds_row(root: Path) -> None:
    with (root / "data/raw/rows.jsonl").open("a") as file:
        file.write("{}\n")


def replaces_weights(root: Path) -> None:
    """Other weights of the same size in a local folder, under the same name."""
    (root / "local/mine/model.safetensors").write_text("others")


def names_a_dataset(root: Path) -> None:
    """A hub id is no path, so a small file names it, and that file is the dependency."""
    (root / "data/raw/talk.hub.yaml").write_text("dataset: someone/talk\nname: null\nsplit: train\nrevision: null\n")
    sets(fix_data={"raw": "data/raw/talk.hub.yaml"})(root)


def adds(name: str) -> Callable[[list[str]], list[str]]:
    return lambda names: [*names, name]


@dataclass(frozen=True)
class Row:
    edit: str
    by: Callable[[Path], None]
    runs: str  # stages, * for any; "-" before those that stay asleep all the same
    back: str | None = None  # what runs when the edit is undone; None: not tried here, to save as much time again


PUBLISHED = {"theirs": {"model": "a/draft", "revision": None, "rope_theta": None}}
E012 = {"e012": {"from": "e009", "epochs": 3}}
HEADS = {"heads": {"from": "e000", "epochs": 3, "method": "medusa", "heads": 4}}
BLOCK = {
    "dflash9": {"from": "e000", "epochs": 9, "method": "dflash", "layers": 2, "block_size": 8, "anchors": 64},
}  # fmt: skip
NGRAM = {"ngram": {"method": "ngram", "longest": 3, "shortest": 1, "length": 8}}
MEDUSA = {"medusa": {"method": "medusa", "checkpoint": "heads", "depth": 4, "nodes": 16}}
RERUNS = [
    Row(
        "benchmark.trees: add t8_2_16",
        sets(benchmark={"trees": adds("t8_2_16")}),
        "benchmark@*-t8_2_16 report",
        back="report",  # which depends on results/cells, and DVC leaves the cells of a stage that is gone in there
    ),
    Row(
        "e012, from e009: in train_draft.checkpoints, replay_trees.checkpoints and benchmark.checkpoints",
        sets(
            train_draft={"checkpoints": E012},
            replay_trees={"checkpoints": adds("e012")},
            benchmark={"checkpoints": adds("e012")},
        ),
        "check_overfit@* train_draft@e012 replay_trees@e012 benchmark@*-e012-* report",
        back="report",
    ),
    Row(
        "a published draft: in import_draft.checkpoints, replay_trees.checkpoints and benchmark.checkpoints",
        sets(
            import_draft={"checkpoints": PUBLISHED},
            replay_trees={"checkpoints": adds("theirs")},
            benchmark={"checkpoints": adds("theirs")},
        ),
        "import_draft@theirs replay_trees@theirs benchmark@*-theirs-* report",
        back="report",
    ),
    Row(
        "Medusa's heads: in train_draft.checkpoints and benchmark_methods.with_draft",
        sets(train_draft={"checkpoints": HEADS}, benchmark_methods={"with_draft": MEDUSA}),
        "check_overfit@* train_draft@heads benchmark_methods@medusa report",
    ),
    Row(
        "a block draft: in train_draft.checkpoints and replay_trees.checkpoints",
        sets(train_draft={"checkpoints": BLOCK}, replay_trees={"checkpoints": adds("dflash9")}),
        "check_overfit@* train_draft@dflash9 replay_trees@dflash9 report",
    ),
    Row(
        "benchmark_methods.without_draft: prompt lookup",
        sets(benchmark_methods={"without_draft": NGRAM}),
        "benchmark_methods_baseline@ngram report",
    ),
    Row(
        "init_draft.sliding_window",
        sets(init_draft={"sliding_window": 2048}),
        "init_draft@* check_overfit@* train_draft@* replay_trees@* time_trees@* benchmark@* benchmark_served@* report",
    ),
    Row(
        "draft_configs/theta_10000.json",
        comments("draft_configs/theta_10000.json"),
        "init_draft@* check_overfit@* train_draft@* replay_trees@* time_trees@* benchmark@* benchmark_served@* report",
    ),
    Row("check_overfit.min_tau", sets(check_overfit={"min_tau": 1.25}), "check_overfit@* report", back=""),
    Row(
        "train_draft.learning_rate",
        sets(train_draft={"learning_rate": lambda old: old / 2}),
        "train_draft@* replay_trees@* benchmark@* benchmark_served@* report",
        back="",
    ),
    Row("replay_trees.topk: another one", sets(replay_trees={"topk": adds(7)}), "replay_trees@* report"),
    Row(
        "replay_trees.trace_trees: another one",
        sets(replay_trees={"trace_trees": adds("t2_2_4")}),
        "replay_trees@* report",
    ),
    Row("time_trees.topk: another one", sets(time_trees={"topk": adds(7)}), "time_trees@* report"),
    Row("time_trees.checkpoints: add e009", sets(time_trees={"checkpoints": adds("e009")}), "time_trees@e009 report"),
    Row(
        "benchmark.workloads: more prompts",
        sets(benchmark={"workloads": {"eval": {"num_prompts": 13}}}),
        "prepare_prompts@eval benchmark*@eval* report",
    ),
    Row(
        "benchmark.workloads: longer answers, repeats",
        sets(benchmark={"workloads": {"eval": {"max_new_tokens": 300, "repeats": 3}}}),
        "benchmark*@eval* report",
    ),
    Row(
        "benchmark.workloads: another one, in benchmark.torch_workloads too",
        sets(benchmark={"workloads": {"chat": {**EVAL, "prompts": "mt_bench"}}, "torch_workloads": adds("chat")}),
        "prepare_prompts@chat benchmark@chat-* report",
        back="report",
    ),
    Row(
        "data/prompt_sets/gsm8k.jsonl: a row",
        comments("data/prompt_sets/gsm8k.jsonl"),
        "prepare_prompts@* benchmark*@* report",
    ),
    Row("sample_target.thinking", sets(sample_target={"thinking": True}), "* -fix_data -prepare_target"),
    Row("report.title", sets(report={"title": "another"}), "report", back=""),
    Row(
        "sample_target.temperature",
        sets(sample_target={"temperature": lambda old: old + 0.1}),
        "* -fix_data -prepare_target",
    ),
    Row(
        "extract_hiddens.processes",
        sets(extract_hiddens={"processes": 8}),
        "",
    ),
    Row(
        "extract_hiddens.dtype",
        sets(extract_hiddens={"dtype": "fp8"}),
        "* -fix_data -prepare_target -sample_target -prepare_prompts@* -benchmark_served_baseline@*",
    ),
    Row("templates/chatml.jinja", comments("templates/chatml.jinja"), "* -fix_data"),
    Row("data/tables/weather.yaml", comments("data/tables/weather.yaml"), "* -prepare_target"),
    Row("prepare_target.seed", sets(prepare_target={"seed": lambda old: old + 1}), "* -fix_data"),
    Row("target.watch: other weights in a local folder", replaces_weights, "* -fix_data"),
    Row("fix_data.eval_share", sets(fix_data={"eval_share": lambda old: old / 2}), "* -prepare_target"),
    Row("fix_data.raw: another row", adds_row, "* -prepare_target"),
    Row("fix_data.raw: a dataset of the hub", names_a_dataset, "* -prepare_target"),
    Row(
        "stages/engine/decode.py: a comment",
        comments("stages/engine/decode.py"),
        "check_overfit@* time_trees@* benchmark@* report",
    ),
    Row(
        "stages/trees/draft_tree.py: a comment",
        comments("stages/trees/draft_tree.py"),
        "check_overfit@* replay_trees@* time_trees@* benchmark@* report",
        back="",
    ),
    Row(
        "stages/target/packed_forward.py: a comment",
        comments("stages/target/packed_forward.py"),
        "* -fix_data -prepare_target -sample_target -prepare_prompts@* -benchmark_served_baseline@*",
    ),
    Row(
        "benchmark_served.trees: add t8_2_16",
        sets(benchmark_served={"trees": adds("t8_2_16")}),
        "benchmark_served@*-t8_2_16 report",
    ),
    Row(
        "stages/serving/engine_flags.py: a comment",
        comments("stages/serving/engine_flags.py"),
        "benchmark_served@* benchmark_served_baseline@* report",
    ),
    Row("stages/report.py: a comment", comments("stages/report.py"), "report"),
    Row("stages/params/schema.py: a comment", comments("stages/params/schema.py"), ""),
    Row("stages/telemetry/gpu_energy.py: a comment", comments("stages/telemetry/gpu_energy.py"), ""),
    Row("README.md", comments("README.md"), ""),
]


def matching(patterns: str, names: set[str]) -> set[str]:
    """The names that `patterns` means; a pattern that means none is a mistake of the table."""
    chosen: set[str] = set()
    for pattern in patterns.split():
        found = {name for name in names if fnmatchcase(name, pattern.removeprefix("-"))}
        assert found, f"{pattern} matches no stage"
        chosen = chosen - found if pattern.startswith("-") else chosen | found
    return chosen


# Outputs that say less than all that their stage reads, and what they do depend on; tests/test_pictured_stages.py compares.
TELLS_OF = {"results/overfit_pass.json": {"data/hiddens/train", "drafts/e000/draft"}}


class Recorder:
    """Stands in for the commands of the stages: notes who runs, writes what depends on all it was given."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.names: set[str] = set()  # of all stages

    def __call__(self, stage: Any, dry: bool = False, run_env: Any = None) -> None:
        self.ran.append(stage.addressing)
        for out in map(str, stage.outs):
            deps = [dep for dep in stage.deps if out not in TELLS_OF or str(dep) in TELLS_OF[out]]
            path = Path(stage.wdir) / out
            file = path if path.suffix else path / "part"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(self._digest(stage.cmd, deps) + out)

    @staticmethod
    def _digest(command: str, deps: list[Any]) -> str:
        digest = hashlib.sha256(command.encode())
        for dep in sorted(deps, key=str):
            if hasattr(dep, "read_params"):
                digest.update(json.dumps(dep.read_params(), sort_keys=True).encode())
            else:
                path = Path(dep.fs_path)
                for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                    digest.update(b"" if file.is_dir() else file.name.encode() + file.read_bytes())
        return digest.hexdigest()

    def repro(self, root: Path, **how: bool) -> set[str]:
        self.ran.clear()
        with opened(root) as repo, lock_repo(repo):  # one index for both
            repo.reproduce(**how)
            self.names = {stage.addressing for stage in repo.index.stages}
        MemoryFileSystem.store.clear()  # where DVC stages folders: it would look through those of all tests before
        MemoryFileSystem.pseudo_dirs[:] = [""]
        assert len(self.ran) == len(set(self.ran))
        return set(self.ran)


@contextmanager
def opened(root: Path) -> Iterator[Repo]:
    """DVC, standing in `root`: it reads the dvc.yaml, and names the stages, of where it stands."""
    with chdir(root), Repo() as repo:
        yield repo


def names(root: Path) -> set[str]:
    with opened(root) as repo:
        return {stage.addressing for stage in repo.index.stages}


def parse_json_or_yaml(parse: Callable[..., Any], text: str, path: str) -> Any:
    return json.loads(text) if text.startswith("{") else parse(text, path)


def parsed_once(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Parse each text once, whichever copy of the project it is read in; `path` is only for errors."""

    @lru_cache(maxsize=16)
    def pickled(text: str) -> bytes:
        return pickle.dumps(parse_json_or_yaml(parse, text, "a copy of the project"))

    return lambda text, path, typ="safe": pickle.loads(pickled(text))


def validated_once(validate: Callable[..., Any]) -> Callable[..., None]:
    """Validate each text of dvc.yaml and dvc.lock once, likewise."""
    seen: set[tuple[int, str]] = set()

    def once(data: Any, schema: Any, text: str, **more: Any) -> None:
        if (id(schema), text) not in seen:
            validate(data, schema, text=text, **more)
            seen.add((id(schema), text))

    return once


def hashed_once(build: Callable[..., Any]) -> Callable[..., Any]:
    """Hash each version of a dependency once: thirty stages have the same modules, each in its own copy of the project."""
    seen: dict[tuple[str, int, int], tuple[Any, Any]] = {}

    def once(odb: Any, path: str, fs: Any, *rest: Any, **how: Any) -> tuple[Any, Any, Any]:
        if not path.endswith(".py"):
            return build(odb, path, fs, *rest, **how)
        found = Path(path).stat()
        key = path.removeprefix(str(Path.cwd())), found.st_size, found.st_mtime_ns
        if key not in seen:
            seen[key] = build(odb, path, fs, *rest, **how)[1:]
        return odb, *seen[key]

    return once


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path_factory.mktemp("site")))
        made = Recorder()
        patch.setattr(dvc.stage.run, "cmd_run", made)
        # dvc.lock is read and written whole after each stage, its comments kept: two thirds of the time here. So as JSON.
        parse = _yaml.parse_yaml
        patch.setattr(_yaml, "parse_yaml_for_update", lambda text, path: parse_json_or_yaml(parse, text, path))
        # In one piece: json.dump writes it in Python, a hundred thousand pieces a file.
        patch.setattr(_yaml, "_dump", lambda data, stream: stream.write(json.dumps(data)))
        cached = parsed_once(parse)
        for module in (_yaml, strictyaml):
            patch.setattr(module, "parse_yaml", cached)
        patch.setattr(strictyaml, "validate", validated_once(strictyaml.validate))
        patch.setattr(dvc.output, "build", hashed_once(dvc.output.build))
        # params.yaml is read once for each stage, and every leaf of it looked at for every key: half of the rest.
        patch.setattr(dpath, "get", lambda tree, key, separator: reduce(getitem, key.split(separator), tree))
        # DVC's locks, which take an eighth of the time; no other process works in this project.
        patch.setattr(dvc.rwlock, "rwlock", lambda *_, **__: nullcontext())
        yield made


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, recorder: Recorder) -> Path:
    """A project in which every stage has run once."""
    root = tmp_path_factory.mktemp("reruns") / "finished"
    (root / ".dvc").mkdir(parents=True)
    config = (REPO / ".dvc" / "config").read_text()
    (root / ".dvc" / "config").write_text(config.replace("[core]", "[core]\n    no_scm = true"))
    for name in ("dvc.yaml", "params.yaml", ".dvcignore"):
        shutil.copy(REPO / name, root / name)
    sets(**BASE)(root)
    code = [
        file for file in (REPO / "stages").rglob("*.*") if file.suffix in (".py", ".j2")
    ]  # of stages yet to come, too
    for name in (file.relative_to(REPO) for file in code):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, root / name)
    (root / "README.md").touch()
    (root / "local" / "mine").mkdir(parents=True)
    (root / "local" / "mine" / "model.safetensors").write_text("weight")
    shutil.copytree(REPO / "data/tables", root / "data/tables")
    (root / "templates").mkdir()
    (root / "templates" / "chatml.jinja").touch()
    (root / "draft_configs").mkdir()
    (root / "draft_configs" / "theta_10000.json").touch()
    (root / "data/prompt_sets").mkdir(parents=True)
    (root / "data/prompt_sets/gsm8k.jsonl").touch()
    shutil.copy(REPO / "data/nothing", root / "data/nothing")
    (root / "data/targets").mkdir()
    (root / "data/targets/weights").touch()
    (root / "data" / "raw").mkdir()
    (root / "data" / "raw" / "rows.jsonl").write_text("{}\n")
    ran = recorder.repro(root)
    assert ran == recorder.names
    assert recorder.repro(root) == set()
    return root


def test_a_published_draft_is_benchmarked_without_sampling_for_training_or_training(
    finished: Path, tmp_path: Path, recorder: Recorder
) -> None:
    """Its cell needs the target, the eval split's prompts and the draft: no hidden states, no draft of ours."""
    root = tmp_path / "project"
    shutil.copytree(finished, root)
    sets(import_draft={"checkpoints": PUBLISHED}, benchmark={"checkpoints": adds("theirs")})(root)
    with opened(root) as repo:
        cell = next(s for s in repo.index.stages if "-theirs-" in s.addressing)
        graph, open_ends, needed = repo.index.graph, [cell], set()
        while open_ends:
            stage = open_ends.pop()
            needed.add(stage.addressing)
            open_ends += graph.successors(stage)
    prompts = {"prepare_prompts@eval", "prepare_target", "sample_target", "fix_data"}
    assert needed == {cell.addressing, "import_draft@theirs"} | prompts


@pytest.mark.parametrize("row", RERUNS, ids=lambda row: row.edit)
def test_an_edit_wakes_its_stages_and_undoing_it_brings_the_rest_back(
    row: Row, finished: Path, tmp_path: Path, recorder: Recorder
) -> None:
    root = tmp_path / "project"
    shutil.copytree(finished, root)
    row.by(root)
    ran = recorder.repro(root)
    assert ran == matching(row.runs, recorder.names)
    if row.back is None:
        return
    for file in ("params.yaml", "README.md", *(path.relative_to(finished) for path in finished.glob("stages/**/*.py"))):
        shutil.copy(finished / file, root / file)
    ran = recorder.repro(root)
    assert ran == matching(row.back, recorder.names)


def pushed(finished: Path, tmp_path: Path) -> Path:
    """A copy of a finished project that has a remote, and all in it that may be there."""
    root = tmp_path / "published"
    shutil.copytree(finished, root)
    local = f"[core]\n    remote = shared\n['remote \"shared\"']\n    url = {tmp_path / 'remote'}\n"
    (root / ".dvc" / "config.local").write_text(local)
    with opened(root) as repo:
        repo.push()
    return root


def cloned(root: Path, to: Path) -> Path:
    """What git has of it: neither DVC's cache nor what the stages made."""
    made = shutil.ignore_patterns("cache", "tmp", "artifacts", "fixed", "sampled", "hiddens", "drafts", "results")
    code = str(root / "stages")  # where a folder is called results, too
    shutil.copytree(root, to, ignore=lambda folder, files: set() if folder.startswith(code) else made(folder, files))
    return to


SHARED = {"pull": True, "allow_missing": True}  # dvc repro --pull --allow-missing


def test_a_clone_runs_only_what_was_edited(finished: Path, tmp_path: Path, recorder: Recorder) -> None:
    """On what its author has published, without the hidden states of training."""
    clone = cloned(pushed(finished, tmp_path), tmp_path / "clone")
    assert recorder.repro(clone, **SHARED) == set()
    assert not (clone / "results").exists()  # nor is anything fetched for it
    with opened(clone) as repo:
        repo.pull(allow_missing=True)
    assert recorder.repro(clone, **SHARED) == set()
    sets(benchmark={"trees": adds("t8_2_16")}, replay_trees={"topk": adds(7)})(clone)
    runs = "benchmark@*-t8_2_16 replay_trees@* report"
    ran = recorder.repro(clone, **SHARED)
    assert ran == matching(runs, recorder.names)
    assert not list(clone.glob("data/hiddens/train/*"))
    sets(train_draft={"learning_rate": lambda old: old / 2})(clone)
    with pytest.raises(ReproductionError) as failed:
        recorder.repro(clone, **SHARED)
    assert "data/hiddens/train" in str(failed.value.__cause__)
    runs = "extract_hiddens train_draft@* replay_trees@* benchmark@* benchmark_served@* report"
    ran = recorder.repro(clone)
    assert ran == matching(runs, recorder.names)
