"""Recipes: whole params.yaml files that may be copied over it, and what they say differs from it."""

import csv
import shutil
from pathlib import Path

import pytest
import torch
from ruamel.yaml import YAML

from stages import params
from stages.builtin import tiny
from stages.drafting import target
from tests.conftest import ROOT, SMALL, copy_project, dvc, edit_params

RECIPES = {
    "weather-tiny-moe": {"target.model": "builtin/weather-tiny-moe", "report.title": "weather-tiny-moe"},
}
every_recipe = pytest.mark.parametrize("name", RECIPES)


def keys(path: Path) -> dict[str, object]:
    sections = YAML(typ="safe").load(path.read_text())
    return {f"{section}.{key}": value for section, held in sections.items() for key, value in held.items()}


@every_recipe
def test_a_recipe_is_params_yaml_but_for_what_it_is_about(name: str) -> None:
    recipe, plain = keys(ROOT / f"recipes/{name}.yaml"), keys(ROOT / "params.yaml")
    params.load(ROOT / f"recipes/{name}.yaml")
    assert recipe.keys() == plain.keys(), "params.yaml has got other keys: change the recipe too"
    assert {key: value for key, value in recipe.items() if value != plain[key]} == RECIPES[name]


def test_every_recipe_is_listed_here() -> None:
    assert {file.stem for file in (ROOT / "recipes").glob("*.yaml")} == set(RECIPES)


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
@every_recipe
def test_a_recipe_runs_from_raw_data_to_the_table(name: str, tmp_path: Path) -> None:
    """Small, and lossless all the same: speculative output is the plain one, token for token."""
    project = copy_project(tmp_path)
    shutil.copy(ROOT / f"recipes/{name}.yaml", project / "params.yaml")
    edit_params(project, SMALL)
    done = dvc(project, "repro")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    with (project / "results/benchmark.csv").open() as file:
        cells = list(csv.DictReader(file))
    assert len(cells) == len(SMALL["benchmark"]["trees"])
    assert all(float(cell["identical_share"]) == 1.0 for cell in cells)
