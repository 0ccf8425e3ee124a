"""Values of params.yaml that are refused: the message has the key, what is expected and what is found."""

import re
from typing import Any

import pytest

from stages.params import schema
from tests.params.params_edits import (
    LEAVES,
    NUMBERS,
    edit_params_text,
    list_problems,
    read_refusal,
    set_value,
    set_values,
)

# May be zero, written by hand: greedy answers, no warm-up, no decay, and the seeds.
ZERO = {
    "fix_data.max_dropped_share", "sample_target.temperature", "train_draft.warmup_steps", "train_draft.weight_decay",
    "train_draft.muon_weight_decay", "train_draft.reach_floor",
    "time_trees.warmup", "benchmark.workloads.eval.warmup", "benchmark.workloads.eval.start", "benchmark.workloads.eval.seed",
    "benchmark.workloads.eval.temperature", "prepare_target.seed", "sample_target.seed", "init_draft.seed", "train_draft.seed",
    "schedule.retry_pause_s",
}  # fmt: skip
every_number = pytest.mark.parametrize("key_path", NUMBERS, ids=".".join)

UNTIL = ("benchmark", "workloads", "eval", "until")
SET_COLUMNS = ("prepare_prompts", "sets", "columns")  # of any set
MAPPINGS = {UNTIL, ("fix_data", "columns")}  # null or a mapping


@pytest.mark.parametrize(
    "key_path", [path for path in LEAVES if path not in MAPPINGS and path[:2] + path[3:] != SET_COLUMNS], ids=".".join
)
def test_a_mapping_is_no_value_of_any_other_key(key_path: tuple[str, ...]) -> None:
    set_value(key_path, {"a": 1})
    (line,) = list_problems()
    assert line.startswith(".".join(key_path) + ": expected ") and "found {'a': 1}" in line


def test_problems_of_keys_and_of_sections_that_disagree_come_together() -> None:
    """Bug: one hand-written file was refused three times, each time for the next problem."""
    edit_params_text(
        ("sample_target|max_new_tokens: 200", "max_new_tokens: 0"),
        ("benchmark|checkpoints: [e009]", "checkpoints: [e010]"),
        ("benchmark|prompts: eval", "prompts: evil"),
        ("min_tau: null", "min_tau: 8.5"),
    )
    found = "\n".join(list_problems())
    expected = (
        "sample_target.max_new_tokens: ",
        "no checkpoint 'e010'",
        "prompts is 'evil'",
        "min_tau 8.5 can't be reached",
    )
    assert all(text in found for text in expected), found


@pytest.mark.parametrize("ttt_steps", [1, 3, 5])
def test_a_draft_of_few_steps_is_held_to_a_threshold_that_it_can_reach(ttt_steps: int) -> None:
    """Bug: check_overfit.min_tau was 6.0 by default, and refused every ttt_steps below 5."""
    set_value(("train_draft", "ttt_steps"), ttt_steps)
    assert 1 < schema.load_params().check_overfit.choose_min_tau(ttt_steps) < ttt_steps + 1


def test_a_checkpoint_with_the_name_of_a_key_that_is_no_section_is_named() -> None:
    """Bug: it ended in a traceback."""
    set_value(("train_draft", "checkpoints", "epochs"), 3)
    assert any(line.startswith("train_draft.checkpoints.epochs: expected a section") for line in list_problems())


@pytest.mark.parametrize("key_path", [("target", "model"), ("init_draft", "from")], ids=".".join)
def test_an_id_is_no_flag_of_the_engine_that_gets_it(key_path: tuple[str, ...]) -> None:
    """Bug: a local target `--load-format=...` was a word of the engine's command line, and a flag there."""
    set_value(key_path, "--load-format=dummy")
    assert list_problems()[0].startswith(f"{'.'.join(key_path)}: expected an id or a path, which does not begin with -")


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ({"half_width": 0.05}, ".most_repeats: missing"),
        ({"half_width": 0, "most_repeats": 8}, ".half_width: expected greater than 0"),
        ({"half_width": 0.05, "most_repeats": 2}, ".most_repeats: expected "),
        (0.05, ": expected "),
    ],
)
def test_until_is_a_half_width_and_a_budget_of_three_repeats_and_more(value: Any, found: str) -> None:
    set_value(UNTIL, value)
    assert any(line.startswith(".".join(UNTIL) + found) for line in list_problems()), list_problems()


def test_a_served_workload_repeats_until_only_beside_its_own_baseline() -> None:
    until: dict[tuple[str, ...], Any] = {UNTIL: {"half_width": 0.05, "most_repeats": 8}}
    set_values(until)
    assert schema.load_params().benchmark.workloads["eval"].fewest_repeats == 3
    until[("benchmark_served", "workloads")] = ["eval"]
    set_values(until)
    assert "expected benchmark_served.interleave: true" in read_refusal()
    set_values(until | {("benchmark_served", "interleave"): True})
    schema.load_params()


@every_number
@pytest.mark.parametrize("value", ["1", True, None, [1]], ids=["text", "true", "null", "list"])
def test_a_number_is_a_number(key_path: tuple[str, ...], value: Any) -> None:
    """Quoted numbers and booleans are not read as 1. Where null means something, the file's comment says what."""
    may_be_null = {
        "fix_data.max_dropped_share", "sample_target.train_rows", "sample_target.eval_rows", "init_draft.draft_vocab_size",
        "benchmark.workloads.eval.num_prompts", "benchmark.workloads.eval.concurrency", "train_draft.learning_rate",
        "train_draft.warmup_steps", "train_draft.batch_tokens",
    }  # fmt: skip
    set_value(key_path, value)
    if value is None and ".".join(key_path) in may_be_null:
        schema.load_params()
        return
    if (
        value == [1]
        and key_path[:2] == ("benchmark", "workloads")
        and key_path[-1] in ("max_new_tokens", "concurrency", "num_prompts")
    ):
        schema.load_params()  # a list is a sweep
        return
    (line,) = list_problems()
    if value == [1] and ".".join(key_path) == "sample_target.temperature":  # a list is a mixture
        assert line == "sample_target.temperature.0: expected a section with temperature, weight, found 1"
        return
    assert re.fullmatch(rf"{re.escape('.'.join(key_path))}: expected .+, found {re.escape(repr(value))}", line)


@every_number
def test_nothing_is_negative(key_path: tuple[str, ...]) -> None:
    set_value(key_path, -1)
    (line,) = list_problems()
    assert re.fullmatch(rf"{re.escape('.'.join(key_path))}: expected greater than (or equal to )?[01], found -1", line)


@every_number
def test_zero_is_refused_but_where_it_means_something(key_path: tuple[str, ...]) -> None:
    set_value(key_path, 0)
    if ".".join(key_path) in ZERO or key_path[-1] == "gpus":
        schema.load_params()
    elif key_path == ("sample_target", "train_rows"):  # which means something where nothing is trained
        assert list_problems()[0].startswith("sample_target.train_rows is 0 and init_draft.checkpoints [e000]")
    elif key_path[-1] == "length_range":  # which means something of random lengths only
        assert list_problems()[0].startswith(
            "benchmark.workloads.eval: length_range is 0.0 with prompts: eval, expected 1"
        )
    else:
        (line,) = list_problems()
        assert re.fullmatch(
            rf"{re.escape('.'.join(key_path))}: expected greater than (or equal to )?[01], found 0", line
        )


@pytest.mark.parametrize(
    ("mixture", "line"),
    [
        ([], "sample_target.temperature: expected at least 1 item, found []"),
        ([{"temperature": 1.0}], "sample_target.temperature.0.weight: missing, and it has no default; write it"),
        (
            [{"temperature": 1, "weight": 1, "top_p": 1}],
            "sample_target.temperature.0.top_p: unknown key; known keys are temperature, weight",
        ),
    ],
)
def test_a_mixture_that_is_none_is_named(mixture: list[Any], line: str) -> None:
    set_value(("sample_target", "temperature"), mixture)
    (found,) = list_problems()
    assert found.startswith(line)


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


BAD_VALUES = [
    ("num_threads: 2", "num_threads: 2.0", "target.num_threads: expected a valid integer, found 2.0"),
    ("device: cpu", "device: gpu", r"target.device: expected text matching ^(cpu|cuda(:\d+)?)$, found 'gpu'"),
    (
        "chat_template: null",
        "chat_template: templates/own.jinja",
        "target.chat_template: expected the file's name without",
    ),
    (
        "feature_layers: null",
        "feature_layers: [4, 2, 3]",
        "target.feature_layers: is [4, 2, 3], expected ids in increasing",
    ),
    (
        "init_draft|feature_layers: null",
        "feature_layers: [2, 3, 4, 5]",
        "init_draft.feature_layers: expected at most 3 items",
    ),
    (
        "num_draft_tokens: [4,",
        "num_draft_tokens: [1,",
        "replay_trees.num_draft_tokens.0: expected greater than or equal to 2",
    ),
    (
        "tables: data/tables/weather.yaml",
        "tables: ../weather.yaml",
        "fix_data.tables: is ../weather.yaml, expected a YAML file",
    ),
    (
        "e009: {from: e003, epochs: 6}",
        "e009: e003",
        "train_draft.checkpoints.e009: expected a section with from, epochs",
    ),
    ("eval_rows: null", "eval_rows: 100", "fix_data: eval_rows is 100, expected null while eval_file is null"),
    ("min_chars: 1 ", "min_chars: 9000 ", "fix_data: min_chars 9000 is above max_chars 8000"),
]


@pytest.mark.parametrize(("old", "new", "start"), BAD_VALUES, ids=[row[1] for row in BAD_VALUES])
def test_what_was_expected_and_found(old: str, new: str, start: str) -> None:
    edit_params_text((old, new))
    (line,) = list_problems()
    assert line.startswith(start)


def test_a_range_of_ports_is_servers_of_sample_target_and_of_no_cell() -> None:
    """Bug: the pattern for one server stood at both, so the list that docs/sampling.md shows was refused."""
    set_value(("sample_target", "server", "base_urls"), ["http://gpu1:8000", "http://gpu2:6000-6007"])
    assert schema.load_params().sample_target.server.base_urls[1] == "http://gpu2:6000-6007"
    set_value(("benchmark_served", "servers", "sglang", "base_urls"), {"baseline": "http://gpu2:6000-6007"})
    assert "benchmark_served.servers.sglang.base_urls.baseline: expected text matching" in read_refusal()


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        (["http://gpu1:6007-6000"], "http://gpu1:6007-6000 is no range of ports, expected the lower port first, both from 1 to"),
        (["http://gpu1:70000"], "http://gpu1:70000 has no such port, expected one from 1 to 65535"),
        (["http://gpu1:6000-6002", "http://gpu1:6001/v1"], "names http://gpu1:6001 twice; name each server once"),
    ],
)  # fmt: skip
def test_wrong_ports_and_servers_named_twice_are_found_when_params_are_read(urls: list[str], message: str) -> None:
    """Bug: sample_target found them when it had loaded the target's tokenizer, and `aerie stale` said nothing."""
    set_value(("sample_target", "server", "base_urls"), urls)
    (line,) = list_problems()
    assert line.startswith(f"sample_target.server.base_urls: {message}")


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ({"baseline": "http://gpu2:0"}, ".baseline: http://gpu2:0 has no such port, expected one from 1 to 65535"),
        (
            {"baseline": "http://gpu2:6000", "e003-t5_1_6": "http://gpu2:6000/v1"},
            ": names http://gpu2:6000 for baseline and e003-t5_1_6, expected a server for each",
        ),
    ],
)
def test_wrong_ports_and_a_server_of_two_configurations_are_found_when_params_are_read(
    urls: dict[str, str], message: str
) -> None:
    """Bug: only the running cell found them, the second of them after the first was measured."""
    set_value(("benchmark_served", "servers", "sglang", "base_urls"), urls)
    (line,) = list_problems()
    assert line.startswith(f"benchmark_served.servers.sglang.base_urls{message}")


@pytest.mark.parametrize("number", [".nan", ".inf", "-.inf"])
def test_no_number_is_infinite(number: str) -> None:
    """Bug: a learning rate of .inf was greater than 0 and so accepted."""
    for key in ("learning_rate: 0.03", "grad_clip: 0.5", "temperature: 0.7", "memory_gib: 0.25"):
        edit_params_text((key, f"{key.split(':')[0]}: {number}"))
        (line,) = list_problems()
        assert "expected a finite number, found " in line
