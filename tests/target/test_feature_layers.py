"""Defaults of feature layers and the numberings of other projects, from hand-written tables of their sources."""

import pytest

from stages.draft import eagle3_checkpoint
from stages.target import feature_layers
from tests.draft.test_checkpoint import SIZES

# after layer k (SGLang, DFlash), HF index (vLLM, speculators), the index in transformers' hidden_states
NUMBERINGS = [(0, 1, 1), (9, 10, 10), (33, 34, 34)]


@pytest.mark.parametrize(("after_layer", "index", "hidden_state"), NUMBERINGS)
def test_an_id_is_the_place_in_hidden_states(after_layer: int, index: int, hidden_state: int) -> None:
    assert feature_layers.to_entering_ids([after_layer]) == [hidden_state] == [index]
    assert feature_layers.to_after_layer_ids([hidden_state]) == [after_layer]


def test_an_exported_draft_lists_each_engines_numbering() -> None:
    after_layer, index, hidden_state = map(list, zip(*NUMBERINGS, strict=True))
    config = eagle3_checkpoint.build_eagle3_config(SIZES, hidden_state, 36, [7])
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == after_layer  # SGLang
    assert config["eagle_aux_hidden_state_layer_ids"] == index  # vLLM
    assert eagle3_checkpoint.read_feature_layers(config, 36) == hidden_state


@pytest.mark.parametrize("num_layers", [7, 24, 36, 62])
def test_a_draft_without_a_list_reads_the_default_of_the_engines(num_layers: int) -> None:
    layers = feature_layers.default_eagle3_feature_layers(num_layers)
    config = eagle3_checkpoint.build_eagle3_config(SIZES, layers, num_layers, [7])
    assert not [key for key in config if key.startswith("eagle")]
    assert eagle3_checkpoint.read_feature_layers(config, num_layers) == layers == [2, num_layers // 2, num_layers - 3]


@pytest.mark.parametrize(
    ("num_layers", "num_draft_layers", "after_layer"),
    [  # as SpecForge's, DeepSpec's and SGLang's code counts them, after layer k
        (24, 5, [1, 6, 11, 16, 21]),
        (36, 5, [1, 9, 17, 25, 33]),
        (64, 5, [1, 16, 31, 46, 61]),
        (36, 1, [18]),
        (36, 2, [1, 33]),
    ],
)
def test_a_block_drafts_default_is_the_published_one(
    num_layers: int, num_draft_layers: int, after_layer: list[int]
) -> None:
    found = feature_layers.default_block_feature_layers(num_layers, num_draft_layers)
    assert found == [k + 1 for k in after_layer]


def test_the_default_of_qwen3_8b() -> None:
    assert feature_layers.default_block_feature_layers(36) == [2, 10, 18, 26, 34]
    union = feature_layers.merge_feature_layers([2, 18, 33], [2, 10, 18, 26, 34])
    assert union == [2, 10, 18, 26, 33, 34]
    assert feature_layers.locate_feature_layers(union, [2, 10, 18, 26, 34], "a draft") == [0, 1, 2, 3, 5]


@pytest.mark.parametrize(
    ("stored", "chosen"),
    [
        ([2, 10, 18, 26, 33, 34], [2, 10, 18, 26, 34]),  # EAGLE-3's layer 33 is not a block draft's
        ([2, 10, 18, 26, 34], [2, 10, 18, 26, 34]),
        ([2, 18, 33], [2, 18, 33]),
    ],
)
def test_a_block_draft_reads_its_published_layers_where_they_are_stored(stored: list[int], chosen: list[int]) -> None:
    assert feature_layers.choose_block_feature_layers(stored, 36) == chosen


@pytest.mark.parametrize("num_layers", range(3, 80))
@pytest.mark.parametrize("num_draft_layers", [1, 2, 3, 5, 8])
def test_a_block_drafts_default_is_of_different_layers_of_the_target(num_layers: int, num_draft_layers: int) -> None:
    found = feature_layers.default_block_feature_layers(num_layers, num_draft_layers)
    assert found == sorted(set(found)) and found[0] > 0 and found[-1] < num_layers
    assert len(found) == min(num_draft_layers, num_layers - 1)
    assert feature_layers.locate_feature_layers(found, found, "a draft") == [*range(len(found))]


def test_the_embedded_target_has_five() -> None:
    """Seven blocks are too few for the published rule, by which two of the five would be one layer."""
    assert feature_layers.default_block_feature_layers(7) == [1, 2, 4, 5, 6]
