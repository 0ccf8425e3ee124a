"""Defaults of feature layers and the numberings of other projects, from hand-written tables of their sources."""

import pytest

from stages.target import feature_layers

# after layer k (SGLang, DFlash), HF index (vLLM, speculators), the index in transformers' hidden_states
NUMBERINGS = [(0, 1, 1), (9, 10, 10), (33, 34, 34)]


@pytest.mark.parametrize(("after_layer", "index", "hidden_state"), NUMBERINGS)
def test_an_id_is_the_place_in_hidden_states(after_layer: int, index: int, hidden_state: int) -> None:
    assert feature_layers.to_entering_ids([after_layer]) == [hidden_state] == [index]
    assert feature_layers.to_after_layer_ids([hidden_state]) == [after_layer]


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
