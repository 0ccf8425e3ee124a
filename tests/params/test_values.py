"""Values of params.yaml that are refused: the message has the key, what is expected and what is found."""

import re
from collections.abc import Iterable
from typing import Any

import pytest

from stages.params import schema
from tests.params.params_edits import LEAVES, NUMBERS, list_problems, read_refusal, set_value, set_values

UNTIL = ("benchmark", "workloads", "eval", "until")
SET_COLUMNS = ("prepare_prompts", "sets", "columns")  # of any set
MAPPINGS = {UNTIL, ("fix_data", "columns")}  # null or a mapping
NO_MAPPINGS = [path for path in LEAVES if path not in MAPPINGS and path[:2] + path[3:] != SET_COLUMNS]


@pytest.mark.parametrize(
    ("key_paths", "value", "expected"),
    [(NO_MAPPINGS, {"a": 1}, ".+"), (NUMBERS, "1", ".+"), (NUMBERS, True, ".+"), (NUMBERS, -1, r"greater than .*[01]")],
    ids=["a mapping", "a quoted number", "true", "a negative number"],
)
def test_every_key_says_what_it_expected_and_found(
    key_paths: Iterable[tuple[str, ...]], value: Any, expected: str
) -> None:
    """One problem a key, all in one message; quoted numbers and booleans are not read as 1."""
    set_values(dict.fromkeys(key_paths, value))
    problems = list_problems()
    for key in map(".".join, key_paths):
        (line,) = (line for line in problems if line.startswith(f"{key}:"))
        assert re.fullmatch(rf"{re.escape(key)}: expected {expected}, found {re.escape(repr(value))}(;.*)?", line), line


@pytest.mark.parametrize("ttt_steps", [1, 3, 5])
def test_a_draft_of_few_steps_is_held_to_a_threshold_that_it_can_reach(ttt_steps: int) -> None:
    """Bug: check_overfit.min_tau was 6.0 by default, and refused every ttt_steps below 5."""
    set_value(("train_draft", "ttt_steps"), ttt_steps)
    assert 1 < schema.load_params().check_overfit.choose_min_tau(ttt_steps) < ttt_steps + 1


def test_a_served_workload_repeats_until_only_beside_its_own_baseline() -> None:
    until: dict[tuple[str, ...], Any] = {UNTIL: {"half_width": 0.05, "most_repeats": 8}}
    set_values(until)
    assert schema.load_params().benchmark.workloads["eval"].fewest_repeats == 3
    until[("benchmark_served", "workloads")] = ["eval"]
    set_values(until)
    assert "expected benchmark_served.interleave: true" in read_refusal()
    set_values(until | {("benchmark_served", "interleave"): True})
    schema.load_params()


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
