"""The list of block methods against what else names them: params.yaml's segments, and the losses of training."""

from typing import get_args

from stages.params.block_draft_methods import ALGORITHMS, BLOCK_METHODS, find_block_method, list_titles
from stages.params.draft_sections import BlockSegment
from stages.training.block_training import OBJECTIVES


def test_params_and_training_know_the_same_methods() -> None:
    assert list(BLOCK_METHODS) == list(get_args(BlockSegment.model_fields["method"].annotation)) == list(OBJECTIVES)
    assert list_titles() == "DFlash, DFlash2 or DSpark" and sorted(ALGORITHMS) == ["DFLASH", "DSPARK"]


def test_a_method_is_found_by_any_architecture_of_a_config() -> None:
    for method in BLOCK_METHODS.values():
        assert find_block_method({"architectures": [method.architecture]}) is method
    assert find_block_method({"architectures": ["Other", "Qwen3DSparkModel"]}) is BLOCK_METHODS["dspark"]
    assert find_block_method({"architectures": ["LlamaForCausalLMEagle3"]}) is find_block_method({}) is None
    assert [method.count_drafts(8) for method in BLOCK_METHODS.values()] == [7, 7, 8]
