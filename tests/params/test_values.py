"""Values of params.yaml that are refused: the message has the key, what is expected and what is found."""

from typing import Any

import pytest

from stages.params import schema
from tests.params.params_edits import edit_params_text, list_problems, set_value

UNTIL = ("benchmark", "workloads", "eval", "until")


@pytest.mark.parametrize("ttt_steps", [1, 3, 5])
def test_a_draft_of_few_steps_is_held_to_a_threshold_that_it_can_reach(ttt_steps: int) -> None:
    """Bug: check_overfit.min_tau was 6.0 by default, and refused every ttt_steps below 5."""
    set_value(("train_draft", "ttt_steps"), ttt_steps)
    assert 1 < schema.load_params().check_overfit.choose_min_tau(ttt_steps) < ttt_steps + 1


@pytest.mark.parametrize(
    ("target", "training"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "bfloat16")]
)
def test_training_computes_as_the_target_does(target: str, training: str) -> None:
    """Bug: beside a target in bfloat16, as `aerie use own` asks for on a GPU, it was float32: ten times the time."""
    set_value(("target", "dtype"), target)
    assert schema.load_params().train_draft.compute_dtype == training


@pytest.mark.parametrize(
    ("temperature", "of_eval"),
    [
        (0, 0.0),
        (0.7, 0.7),
        ([{"temperature": 0, "weight": 9}, {"temperature": 0.3, "weight": 1}, {"temperature": 0.6, "weight": 1}], 0.3),
        ([{"temperature": 0.3, "weight": 1}, {"temperature": 0.6, "weight": 2}], 0.6),
        ([{"temperature": 0, "weight": 1}], 0.0),
    ],
)
def test_eval_is_at_one_temperature(temperature: Any, of_eval: float) -> None:
    set_value(("sample_target", "temperature"), temperature)
    assert schema.load_params().sample_target.eval_temperature == of_eval


def test_gpus_are_shared_out_among_whole_copies_of_the_target() -> None:
    two = ("num_gpus_total: 1 ", "num_gpus_total: 6 "), ("num_gpus_per_model: 1 ", "num_gpus_per_model: 2 ")
    edit_params_text(*two, ("device: cpu ", "device: cuda "))
    assert schema.load_params().benchmark.processes == 3
    edit_params_text(*two)
    (line,) = list_problems()
    assert line.startswith("benchmark.num_gpus_per_model is 2, expected 1")
