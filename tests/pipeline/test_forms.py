"""What the forms' answers become: sections as a recipe has them, and params.yaml with them is valid."""

import pytest
from pydantic import ValidationError

from pipeline import recipes
from pipeline.forms import Changes, Sweep
from stages.params import load


def test_epochs_become_a_chain_of_segments_and_its_names_stand_in_every_list(home) -> None:
    recipes.change(Changes(epochs=[3, 9, 12]).sections(load()))
    found = load()
    chain = [(name, segment.from_, segment.epochs) for name, segment in found.train_draft.checkpoints.items()]
    assert chain == [("e003", "e000", 3), ("e009", "e003", 6), ("e012", "e009", 3)]
    assert found.benchmark.checkpoints == found.replay_trees.checkpoints == ["e003", "e009", "e012"]


def test_imported_drafts_stay_in_the_lists(home) -> None:
    imported = {"theirs": {"model": "someone/draft", "revision": None, "rope_theta": None}}
    recipes.change({"import_draft": {"checkpoints": imported}, "benchmark": {"checkpoints": ["theirs", "e009"]}})
    recipes.change(Changes(epochs=[2]).sections(load()))
    assert load().benchmark.checkpoints == ["e002", "theirs"]


def test_other_methods_stay_trained(home) -> None:
    """Bug to be: their segments went with the chain that was replaced, and rows of the table named what was gone."""
    recipes.use("weather-tiny-methods")
    recipes.change(Changes(epochs=[9]).sections(load()))
    assert list(load().train_draft.checkpoints) == ["e009", "eagle9", "medusa9"]
    assert load().train_draft.checkpoints["medusa9"].width == 5


def test_other_keys_go_where_they_belong_and_what_is_empty_stays(home) -> None:
    before = load()
    changes = Changes(trees=["t5_1_6"], other={"train_draft.learning_rate": 0.0003, "sample_target.server.attempts": 2})
    assert recipes.change(changes.sections(before)) == [
        "train_draft.learning_rate: 0.001 -> 0.0003",
        "sample_target.server.attempts: 6 -> 2",
        f"benchmark.trees: {before.benchmark.trees} -> ['t5_1_6']",
    ]
    assert load().sample_target.server == before.sample_target.server.model_copy(update={"attempts": 2})


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("learning_rate", "no key of params.yaml"),
        ("train_draft.lerning_rate", "unknown key"),
        ("train.seed", "is no key"),
    ],
)
def test_a_key_that_is_none_is_refused_and_params_yaml_stays(home, key: str, message: str) -> None:
    before = (home / "params.yaml").read_text()
    with pytest.raises(ValueError, match=message):
        recipes.change(Changes(other={key: 1}).sections(load()))
    assert (home / "params.yaml").read_text() == before


def test_a_sweep_of_either_engine(home) -> None:
    axes = {"trees": ["t8_2_16"], "checkpoints": ["e003"], "workloads": ["eval"]}
    assert Sweep(**axes).sections(load()) == {
        "benchmark": {"trees": ["t8_2_16"], "checkpoints": ["e003"], "torch": ["eval"]}
    }
    assert Sweep(**axes, engine="served").sections(load()) == {"benchmark_served": axes}
    assert Sweep(trees=["t8_2_16"]).sections(load()) == {"benchmark": {"trees": ["t8_2_16"]}}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"trees": ["t8_1_16"]}, "write t8_1_9"),
        ({"trees": ["8_2_16"]}, "match pattern"),
        ({"epochs": [9, 3]}, "sort them"),
    ],
)
def test_what_cannot_be_is_refused(given: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Changes(**given)
