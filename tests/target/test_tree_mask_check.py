"""A class that can't verify trees is found out with one block, and every class of target that we know can."""

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from stages import prepare_target
from stages.engine import tree_masks
from stages.target import head_check
from tests.target.pinned_targets import LLAMA, pinned
from tests.target.test_target_forward import every_class, save_random_model


@every_class
def test_one_block_of_every_class_computes_trees(tmp_path: Path, name: str) -> None:
    save_random_model(tmp_path, name, False)
    assert tree_masks.explain_tree_mask_failure(head_check.load_first_block(str(tmp_path), False)) is None


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("blind", r"tokens of a tree have other hidden states than each alone .*, whatever the mask; the torch engine"),
        ("refusing", r"its decoder takes no mask of a tree \(IndexError: two dimensions\); the torch engine"),
    ],
)
def test_a_class_that_goes_by_no_mask_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, message: str
) -> None:
    """Bug: such a class passed, and check_overfit ended in its traceback, after sampling and extraction."""
    pinned(tmp_path, monkeypatch, LlamaForCausalLM(LlamaConfig(**LLAMA)))
    load = head_check.load_first_block

    def forget(_module: Any, args: Any, kwargs: Any) -> Any:
        if kind == "refusing" and kwargs.get("attention_mask") is not None:
            raise IndexError("two dimensions")
        return args, {**kwargs, "attention_mask": None}

    def load_hooked(*given: Any) -> Any:
        model = load(*given)
        model.get_decoder().register_forward_pre_hook(forget, with_kwargs=True)
        return model

    monkeypatch.setattr(head_check, "load_first_block", load_hooked)
    with pytest.raises(ValueError, match=rf"target\.model mine: of LlamaForCausalLM, {message}"):
        prepare_target.main()
