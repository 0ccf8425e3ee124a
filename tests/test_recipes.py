"""Recipes: what they change in params.yaml, what they would take, and that those run that can run here.

Of each: it is valid, DVC resolves its graph, its target's config is recorded, the draft's follows, and sizes, disk and
hours are known, without a GPU or a download. All in this process, for each part of that takes seconds to start.
"""

import csv
import pickle
import shutil
import stat
import subprocess
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML

from pipeline import fetch, recipes, reproduce
from pipeline.recipes import use_recipe
from stages import init_draft
from stages.cells.cell import Cell
from stages.draft.eagle3 import Eagle3Draft
from stages.params import schema
from stages.params.draft_sections import TrainDraft
from stages.params.engines import list_environments
from stages.published import tables as published
from stages.reproduce import estimate, target_size
from stages.runtime import atomic
from tests.conftest import ROOT, SMALL, copy_project, edit_params, run_graph

NAMES = sorted(file.stem for file in (ROOT / "recipes").glob("*.yaml"))
BUILTIN = [name for name in NAMES if name.startswith("weather-tiny")]  # the others need a GPU and a download
every_recipe = pytest.mark.parametrize("name", NAMES)


@pytest.fixture
def project(home: Path) -> Path:
    return home


MERGE_SECTIONS = recipes._merge_sections


@lru_cache
def merge_pickled(base: str, layers: bytes) -> tuple[str, list[str]]:
    return MERGE_SECTIONS(base, pickle.loads(layers))


@pytest.fixture(autouse=True)
def merged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge a recipe into the same params.yaml once for all tests: the parser that keeps comments is slow."""
    monkeypatch.setattr(recipes, "_merge_sections", lambda base, layers: merge_pickled(base, pickle.dumps(layers)))


@lru_cache
def merge(name: str) -> tuple[schema.Params, list[str], dict[str, list[str]]]:
    """What params.yaml is with a recipe, what that changes, and the stages that DVC makes of it; the same in every `project`."""
    with recipes.merge_recipe(name) as (file, changes):
        return schema.load_params(file), changes, reproduce.list_stages_with(file)


@every_recipe
def test_a_recipe_changes_its_keys_and_loses_no_comment_but_of_what_it_replaces(name: str, project: Path) -> None:
    about, recipe = schema.read_recipe(project / f"recipes/{name}.yaml")
    assert about is not None
    before = (project / "params.yaml").read_text().splitlines()
    use_recipe(name)
    found = YAML(typ="safe").load((project / "params.yaml").read_text())
    defaults = schema.load_params().model_dump(by_alias=True)
    for section, keys in recipe.items():
        for key, value in keys.items():
            now = found.get(section, {}).get(key, defaults[section][key])
            assert now == value or (key == "server" and now == now | value), (section, key)
    assert "recipe" not in found
    after = (project / "params.yaml").read_text().splitlines()
    comments = [line.partition("#")[2] for line in after if "#" in line]
    replaced = {"benchmark": {"workloads"}, "prepare_prompts": {"sets"}, "train_draft": {"checkpoints"}}
    lost = [line for line in before if "#" in line and line.partition("#")[2] not in comments]
    if not any(keys & set(recipe.get(section, {})) for section, keys in replaced.items()):
        assert lost == []
    inside = [line for line in lost if not line.startswith("      ")]
    assert inside == [], "comments of the sections themselves"
    assert use_recipe(name) == []


@every_recipe
def test_a_recipe_is_valid_its_graph_resolves_and_what_it_takes_is_known(name: str, project: Path) -> None:
    about, _ = schema.read_recipe(project / f"recipes/{name}.yaml")
    assert about is not None
    p, changes, stages = merge(name)
    assert changes or name == "weather-tiny"
    assert not list(project.glob(".params-*"))
    cells = {
        f"benchmark@{w}-{c}-{t}"
        for w in p.benchmark.torch_workloads
        for c in p.benchmark.checkpoints
        for t in p.benchmark.trees
    }
    served = p.benchmark_served
    cells |= {
        f"benchmark_served@{e}-{w}-{c}-{t}"
        for e, w, c, t in product(served.engines, served.workloads, served.checkpoints, served.trees)
    }
    cells |= {f"benchmark_served_baseline@{e}-{w}" for e, w in product(served.engines, served.workloads)}
    assert {stage for stage in stages if stage.startswith("benchmark")} == cells
    if p.train_draft.checkpoints and p.train_draft.optimizer == "muon" and not p.target.model.startswith("builtin/"):
        assert p.train_draft.muon_learning_rate == TrainDraft.model_fields["muon_learning_rate"].default, (
            "the toy's rate"
        )
    made = {f"train_draft@{name}" for name in p.train_draft.checkpoints}
    made |= {f"import_draft@{name}" for name in p.import_draft.checkpoints}
    assert {stage for stage in stages if stage.partition("_")[0] in ("train", "import")} == made
    assert made < set(stages["report"]), "report depends on every draft's report"

    shape, found = target_size.read_target_size(p), estimate.estimate_run(p, about.train_rows, about.row_tokens)
    draft = init_draft.infer_config(p, shape.manifest)
    with torch.device("meta"):
        parameters = sum(x.numel() for x in Eagle3Draft(draft).parameters())
    assert parameters == sum(estimate.count_draft_parameters(draft).values())
    assert found.disk_bytes > 0 and (found.gpu_hours > 0) == (p.target.device != "cpu")


@every_recipe
def test_what_a_recipe_reproduces_is_published_and_has_a_cell(name: str, project: Path) -> None:
    about, _ = schema.read_recipe(project / f"recipes/{name}.yaml")
    assert about is not None
    p, _, _ = merge(name)
    publications = published.read_publications()
    for match in about.beside:
        rows = [r for r in publications[match.publication] if _is_of(r.setting, match.rows)]
        assert rows, f"{match.publication} has no row of {match.rows}"
        assert "target" in about.substitutes or published.normalise_model_name(
            p.target.model
        ) == published.normalise_model_name(str(match.rows["target"]))
        assert match.cells.workload in p.benchmark.workloads
        temperatures = {match.assumed.get("temperature", row.setting.temperature) for row in rows}
        assert temperatures == {p.benchmark.workloads[match.cells.workload].temperature}
        assert match.cells.checkpoint in {None, *p.train_draft.checkpoints, *p.import_draft.checkpoints}
        assert match.cells.engine in ("torch", *p.benchmark_served.engines)
        trees = p.benchmark.trees if match.cells.engine == "torch" else p.benchmark_served.trees
        found = {match.assumed.get("tree") if r.setting.tree == published.UNKNOWN else r.setting.tree for r in rows}
        assert found - {None} <= set(trees)


def _is_of(setting: published.PublishedSetting, wanted: dict[str, Any]) -> bool:
    return all(getattr(setting, key) == value for key, value in wanted.items())


@pytest.fixture
def committed(project: Path) -> Path:
    """The project with params.yaml in git."""
    for words in (
        ["init", "-q"],
        ["add", "params.yaml"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"],
    ):
        subprocess.run(["git", *words], cwd=project, check=True)
    return project


@pytest.mark.parametrize("first", ["weather-tiny-vl", "qwen3-coder-30b-a3b"])
def test_recipes_never_mix(committed: Path, first: str) -> None:
    """Bug: `use A` then `use B` kept what A had set and B does not name."""
    use_recipe("angelslim-qwen3-1.7b")
    alone = (committed / "params.yaml").read_bytes()
    use_recipe(first)
    assert (committed / "params.yaml").read_bytes() != alone
    assert not [line for line in use_recipe("angelslim-qwen3-1.7b") if "local edit" in line]
    assert (committed / "params.yaml").read_bytes() == alone


def test_a_recipe_over_use_own_keeps_target_data_and_device(committed: Path) -> None:
    """Bug: it put back the recipe's own target and data, so a model of one's own on eight GPUs was many keys by hand."""
    use_recipe("train-qwen3-8b-8gpu")
    alone = schema.load_params()
    use_recipe("own")
    edit_params(
        committed,
        {"target": {"model": "our/model", "device": "cpu"}, "fix_data": {"raw": "data/raw/mine", "max_chars": 90}},
    )
    for _ in range(2):
        use_recipe("train-qwen3-8b-8gpu")
        found = schema.load_params()
        assert (found.target.model, found.target.device, found.target.dtype) == ("our/model", "cpu", "float32")
        assert (found.fix_data.raw, found.fix_data.max_chars, found.fix_data.format) == ("data/raw/mine", 90, "auto")
        assert (found.fix_data.answers, found.fix_data.tables) == ("text", None)  # not the toy's
        assert found.model_dump(exclude={"target", "fix_data"}) == alone.model_dump(exclude={"target", "fix_data"})
    shutil.copy(committed / "params.yaml.before-own", committed / "params.yaml")
    use_recipe("train-qwen3-8b-8gpu")
    assert schema.load_params() == alone


def test_a_local_edit_that_goes_is_named_and_kept_on_request(committed: Path) -> None:
    use_recipe("weather-tiny-moe")
    edit_params(committed, {"train_draft": {"muon_learning_rate": 0.0125}, "target": {"num_threads": 1}})
    edited = (committed / "params.yaml").read_bytes()
    dropped = use_recipe("weather-tiny-vl")
    assert "train_draft.muon_learning_rate: 0.0125 -> 0.008  (a local edit; --keep keeps it)" in dropped
    assert sum("a local edit" in line for line in dropped) == 2 and "target.num_threads: 1 -> 2" in "".join(dropped)
    (kept_copy,) = [line.split()[-2] for line in dropped if "to return to it: cp" in line]
    assert (committed / kept_copy).read_bytes() == edited
    shutil.copy(committed / kept_copy, committed / "params.yaml")
    atomic.write_json(recipes.USED_FILE, schema.read_recipe(committed / "recipes/weather-tiny-moe.yaml")[1])
    kept = use_recipe("weather-tiny-vl", keep=True)
    p = schema.load_params()
    assert (p.train_draft.muon_learning_rate, p.target.num_threads, p.target.model) == (
        0.0125,
        1,
        "builtin/weather-tiny-vl",
    )
    assert "kept: train_draft.muon_learning_rate: 0.0125" in kept


def test_use_keeps_the_files_mode_and_a_copy_of_the_checkpoints_that_it_replaces(project: Path) -> None:
    """Bug: params.yaml was left at mode 0600, and a user's own checkpoints were gone with no way back."""
    mine = {"e002": {"from": "e000", "epochs": 2}}
    names = {"checkpoints": ["e002"]}
    edit_params(project, {"train_draft": {"checkpoints": mine}, "replay_trees": names, "benchmark": names})
    edit_params(project, {"benchmark_served": names, "time_cycles": {"checkpoints": ["e000"]}})
    (project / "params.yaml").chmod(0o644)
    before = (project / "params.yaml").read_bytes()
    (project / "mine.yaml").write_text(
        "train_draft: {checkpoints: {e001: {from: e000, epochs: 1}}}\n"
        "replay_trees: {checkpoints: [e001]}\nbenchmark: {checkpoints: [e001]}\nbenchmark_served: {checkpoints: [e001]}\n"
    )
    changes = use_recipe("mine.yaml")
    assert "train_draft.checkpoints: e002 -> e001" in changes
    assert changes[-1].endswith("to return to it: cp params.yaml.before-mine params.yaml")
    assert stat.S_IMODE((project / "params.yaml").stat().st_mode) == 0o644
    kept = project / "params.yaml.before-mine"
    assert kept.read_bytes() == before
    shutil.copy(kept, project / "params.yaml")
    assert use_recipe("mine.yaml")[-1] == changes[-1] and not (project / "params.yaml.before-mine-2").exists()
    assert use_recipe("mine.yaml") == []


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("target: {modle: x}", "target: unknown key modle"),
        ("target", r"mine\.yaml: expected the sections target, prepare_target, .*; found 'target'"),
        ("benchmark: {checkpoints: [e077]}", "no checkpoint 'e077'"),
    ],
)
def test_a_wrong_recipe_changes_nothing(recipe: str, message: str, project: Path) -> None:
    before = (project / "params.yaml").read_text()
    (project / "mine.yaml").write_text(recipe)
    with pytest.raises(ValueError, match=message):
        use_recipe("mine.yaml")
    assert (project / "params.yaml").read_text() == before
    assert not list(project.glob(".params-*"))
    with pytest.raises(ValueError, match="there is no recipe recipes/yours"):
        use_recipe("yours")


def shrink(project: Path) -> None:
    """Make the recipe in use a small run, with its drafts of other families."""
    yaml = YAML(typ="safe")
    params = yaml.load((project / "params.yaml").read_text())
    declared = params["train_draft"]["checkpoints"]
    used = {name: keys for name, keys in declared.items() if keys.get("method")}
    short = {name: {**settings, "from": "e000", "epochs": 1} for name, settings in used.items()}
    checkpoints = {"checkpoints": SMALL["train_draft"]["checkpoints"] | short}
    edit_params(project, SMALL | {"train_draft": checkpoints})


@pytest.mark.long
@pytest.mark.parametrize("name", BUILTIN)
def test_a_recipe_runs_from_raw_data_to_the_table(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small, and lossless all the same: speculative output is the plain one, token for token."""
    project = copy_project(tmp_path)
    monkeypatch.chdir(project)
    use_recipe(name)
    shrink(project)
    done = run_graph(project)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    with (project / "results/benchmark.csv").open() as file:
        cells = [row for row in csv.DictReader(file) if row["source"] == "measured"]
    assert len(cells) == len(SMALL["benchmark"]["trees"])
    assert all(float(cell["identical_share"]) == 1.0 for cell in cells)


@pytest.mark.long
@pytest.mark.parametrize(
    ("engine", "flags"), [("llama.cpp", []), ("vllm", ["--enforce-eager", "--max-model-len", "512"])]
)
def test_engines_accept_what_ours_does_on_a_real_target(
    engine: str, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SmolLM2 from its package with the shipped draft: cycles of each request, by the counters of an engine we did not write."""
    environment = next((path for path in list_environments(engine) if (ROOT / path).exists()), None)
    if environment is None:
        pytest.skip(f"no {engine} here: make serving-env")
    monkeypatch.chdir(copy_project(tmp_path))
    environment.parent.mkdir(exist_ok=True)
    Path("data/drafts").symlink_to(ROOT / "data/drafts")
    environment.symlink_to(ROOT / environment)
    print(*fetch.fetch_recipe("smollm2-135m"), sep="\n")
    use_recipe("smollm2-135m")
    workloads, servers = ["problems", "humaneval", "chat"], {engine: {"launch_args": flags}}
    served: dict[str, Any] = {"engines": [engine], "workloads": workloads, "servers": servers}
    edit_params(tmp_path, {"benchmark_served": served})
    done = run_graph(tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    for workload in workloads:
        cells = [Cell.read(name, workload, "shipped", "t3_1_4") for name in ("torch", engine)]
        own, theirs = ([(r["id"], r["cycles"]) for r in cell["points"][0]["requests"]] for cell in cells)
        assert own == theirs and len(own) == 6
