"""Defaults of feature layers and the numberings of other projects, from hand-written tables of their sources."""

import pytest

from stages.target import feature_layers


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
