"""Defaults of feature layers and the numberings of other projects, from hand-written tables of their sources."""

import pytest

from stages.target import feature_layers


@pytest.mark.parametrize(
    ("num_layers", "after_layer"),
    [  # as SpecForge's, DeepSpec's and SGLang's code counts them, after layer k
        (24, [1, 6, 11, 16, 21]),
        (36, [1, 9, 17, 25, 33]),
        (64, [1, 16, 31, 46, 61]),
    ],
)
def test_a_block_drafts_default_is_the_published_one(num_layers: int, after_layer: list[int]) -> None:
    found = feature_layers.choose_block_feature_layers(range(num_layers), num_layers)
    assert found == [k + 1 for k in after_layer]
