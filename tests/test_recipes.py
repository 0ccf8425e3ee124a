"""Recipes: what they change in params.yaml, and that what they make runs."""

import csv
import shutil
from pathlib import Path

import polars as pl
import pytest
import torch
from ruamel.yaml import YAML
from transformers import AutoTokenizer

from pipeline.__main__ import use
from stages import fix_data, params, prepare_target, sample_target
from stages.builtin import tiny
from stages.drafting import pixels, sample, target
from tests.conftest import ROOT, SMALL, copy_project, dvc, edit_params

every_recipe = pytest.mark.parametrize("name", sorted(file.stem for file in (ROOT / "recipes").glob("*.yaml")))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    shutil.copy(ROOT / "params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@every_recipe
def test_a_recipe_changes_its_keys_and_not_a_comment(name: str, project: Path) -> None:
    recipe = YAML(typ="safe").load((project / f"recipes/{name}.yaml").read_text())
    before = (project / "params.yaml").read_text().splitlines()
    use(name)
    p = params.load()
    for section, keys in recipe.items():
        for key, value in keys.items():
            assert getattr(getattr(p, section), key) == value
    after = (project / "params.yaml").read_text().splitlines()
    changed = [line for line in after if line not in before]
    assert len(after) == len(before) and len(changed) <= sum(map(len, recipe.values()))
    comments = [line.partition("#")[2] for line in before]
    assert [line.partition("#")[2] for line in after] == comments
    assert use(name) == []


def test_and_back_again(project: Path) -> None:
    before = (project / "params.yaml").read_text()
    assert use("weather-tiny-moe")[0] == "target.model: builtin/weather-tiny -> builtin/weather-tiny-moe"
    use("weather-tiny")
    assert params.load() == params.load(ROOT / "params.yaml")
    assert (project / "params.yaml").read_text().split() == before.split()


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("target: {modle: x}", "target.modle: unknown key"),
        ("target", "expected sections with keys"),
        ("target: {a: 1", "is not valid YAML"),
        ("benchmark: {checkpoints: [e077]}", "'e077' is not trained"),
    ],
)
def test_a_wrong_recipe_changes_nothing(recipe: str, said: str, project: Path) -> None:
    before = (project / "params.yaml").read_text()
    (project / "mine.yaml").write_text(recipe)
    with pytest.raises(ValueError, match=said):
        use("mine.yaml")
    assert (project / "params.yaml").read_text() == before
    assert not list(project.glob(".params-*"))
    with pytest.raises(ValueError, match="there is no recipe recipes/yours"):
        use("yours")


def test_the_embedded_experts_learn_and_are_a_target_like_any_other(tmp_path: Path) -> None:
    """A few steps; each token takes two of eight; saved and loaded, it says the same, and packs its documents."""
    corpus = tiny.corpus(7)[:200]
    tokenizer = tiny.build_tokenizer(tiny.texts(corpus))
    model = tiny.build_model(tokenizer, 7, "weather-tiny-moe")
    rows = tiny.encode(tokenizer, corpus)
    losses = [loss for _, loss in tiny.train(model, rows, 7, 6, 512, 0.03)]
    assert losses[-1] < losses[0]
    model.eval().save_pretrained(tmp_path)
    loaded = target.load(str(tmp_path), None, "float32", "cpu")
    ids = torch.cat([rows[0][0], rows[1][0]])
    lengths = [len(rows[0][0]), len(rows[1][0])]
    with torch.inference_mode():
        alone = torch.cat([model.model(input_ids=row[None]).last_hidden_state[0] for row in ids.split(lengths)])
        router = model(input_ids=ids[None], output_router_logits=True).router_logits[0]
    assert target.packs(loaded)
    torch.testing.assert_close(target.forward_documents(loaded, ids, lengths, True), alone, rtol=1e-4, atol=1e-4)
    assert router.shape == (len(ids), 8) and loaded.config.num_experts_per_tok == 2


@pytest.mark.long
def test_the_embedded_target_that_sees_reads_maps_it_never_saw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers to the eval questions are the tables the maps were drawn from; with maps swapped, they follow the maps."""
    monkeypatch.chdir(copy_project(tmp_path))
    use("weather-tiny-vl")
    edit_params(tmp_path, {"sample_target": {"train_rows": 1, "temperature": 0.0}})
    fix_data.main()
    prepare_target.main()
    sample_target.main()
    tokenizer = AutoTokenizer.from_pretrained("artifacts/target")
    model, eyes = target.load("artifacts/target", None, "float32", "cpu"), pixels.Eyes("artifacts/target", False)
    (end,) = {model.config.get_text_config().eos_token_id}

    def table(text: str) -> list[list[str]]:
        """The rows' cells less the date, which is in the question."""
        return [line.removesuffix("<|im_end|>").split(",")[1:] for line in text.split("\n")[3:]]

    data = {row["id"]: row for row in pl.read_parquet("data/fixed/eval.parquet").to_dicts()}
    own, swapped = [], []
    rows = [row for row in pl.read_parquet("data/sampled/eval/*.parquet").to_dicts() if len(row["images"]) == 1]
    drawn = [table(data[row["id"].rpartition(".")[0]]["messages"][2]["content"]) for row in rows]
    for number, row in enumerate(rows):
        own += zip(drawn[number], table(tokenizer.decode(row["answer_ids"])), strict=False)
        same_size = [k for k, days in enumerate(drawn) if len(days) == len(drawn[number]) and k != number]
        for other in same_size[:1]:
            seen = eyes.see(rows[other]["images"])
            ((ids, _),) = sample.answer(model, [row["prompt_ids"]], 200, 0.0, 1.0, [end], end, 1, seen)
            swapped += zip(drawn[other], table(tokenizer.decode(ids)), strict=False)
    assert len(own) > 50 and sum(a == b for a, b in own) > 0.8 * len(own)
    assert len(swapped) > 30 and sum(a == b for a, b in swapped) > 0.8 * len(swapped)


@pytest.mark.long
@every_recipe
def test_a_recipe_runs_from_raw_data_to_the_table(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small, and lossless all the same: speculative output is the plain one, token for token."""
    project = copy_project(tmp_path)
    monkeypatch.chdir(project)
    use(name)
    edit_params(project, SMALL)
    done = dvc(project, "repro")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    with (project / "results/benchmark.csv").open() as file:
        cells = list(csv.DictReader(file))
    assert len(cells) == len(SMALL["benchmark"]["trees"])
    assert all(float(cell["identical_share"]) == 1.0 for cell in cells)
