"""params.yaml is refused before any work, in one message: file, key, what was expected, what was found, what to do."""

import copy
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from stages.params import checks, gpus, schema
from stages.params.error_messages import OLD_KEYS
from stages.params.spelling import suggest_name
from stages.params.tree_shape import TreeShape, count_candidates

ROOT = Path(__file__).parents[1]
REAL = (ROOT / "params.yaml").read_text(encoding="utf-8")
READ = YAML(typ="safe").load(REAL)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own with the real params.yaml."""
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text(REAL, encoding="utf-8")
    return tmp_path


MEASURED = "".join(re.findall(r"\[e009\] .*\n  trees", REAL))  # benchmark.checkpoints, with its comment


def edited(*changes: tuple[str, str]) -> None:
    """Change params.yaml as a user does, in its text."""
    text = REAL
    for old, new in changes:
        assert text.count(old) >= 1, old
        text = text.replace(old, new, 1)
    Path("params.yaml").write_text(text, encoding="utf-8")


def set_value(place: tuple[str, ...], value: Any) -> None:
    """Set one key of params.yaml, or delete it where the value is `...`."""
    whole = copy.deepcopy(READ)
    section = whole
    for part in place[:-1]:
        section = section[part]
    section[place[-1]] = value
    if value is ...:
        del section[place[-1]]
    Path("params.yaml").write_text(json.dumps(whole, sort_keys=True))  # JSON is YAML, and written in no time


def refusal() -> str:
    """The one message; fails where the file is accepted."""
    with pytest.raises(ValueError, match=r"^params\.yaml") as error:
        schema.load_params()
    assert type(error.value) is ValueError
    assert error.value.__context__ is None or error.value.__suppress_context__  # no second traceback above it
    return str(error.value)


def problems() -> list[str]:
    """Every problem the message names, a line each."""
    head, *lines = refusal().split("\n")
    assert head == f"params.yaml has {len(lines)} problem(s) to correct:"
    assert all(line.startswith("  ") for line in lines)
    return [line.strip() for line in lines]


def leaves(section: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from leaves(value, (*above, key))
        else:
            yield (*above, key), value


LEAVES = dict(leaves(READ))
NUMBERS = {place: value for place, value in LEAVES.items() if type(value) in (int, float)}
# May be zero, written by hand: greedy answers, no warm-up, no decay, and the seeds.
ZERO = {
    "fix_data.max_dropped_share", "sample_target.temperature", "train_draft.warmup_steps", "train_draft.weight_decay",
    "time_trees.warmup", "benchmark.workloads.eval.warmup", "benchmark.workloads.eval.start", "benchmark.workloads.eval.seed",
    "benchmark.workloads.eval.temperature", "prepare_target.seed", "sample_target.seed", "init_draft.seed", "train_draft.seed",
    "schedule.retry_pause_s",
}  # fmt: skip
every_key = pytest.mark.parametrize("place", LEAVES, ids=".".join)
every_number = pytest.mark.parametrize("place", NUMBERS, ids=".".join)


# --- the real file --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a: " + "[" * 100_000, "- " * 100_000 + "x", "a: " + "[" * 900 + "]" * 900])
def test_too_deep_nesting_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Bug: a hundred thousand levels ended Python by a segmentation fault in the YAML parser."""
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text(text)
    message = "params.yaml is not valid YAML: line 1: expected at most 32 levels of nesting, found more; correct it"
    assert refusal() == message
    Path("recipe.yaml").write_text(text)
    with pytest.raises(ValueError, match="expected at most 32 levels"):
        schema.read_recipe(Path("recipe.yaml"))


def test_the_committed_file_loads_as_it_is_written() -> None:
    """Each value of the file is the value of the attribute: nothing is renamed, cast or filled in."""
    whole = schema.load_params().model_dump(by_alias=True)
    assert whole == READ
    assert len(LEAVES) > 60 and len(NUMBERS) > 35


def test_the_committed_trees_can_all_be_built_and_replayed() -> None:
    """A served tree that the replay's grid doesn't hold could not be compared with its prediction."""
    p = schema.load_params()
    grid = {tree.name for tree in p.replay_trees.list_trees()}
    assert set(p.benchmark.trees) <= grid


def test_parameters_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        schema.load_params().target.num_threads = 3  # type: ignore[misc]


def test_loading_costs_no_torch() -> None:
    """`make run` and the flows check the file first; torch would take seconds."""
    code = (
        "import sys; from stages import params; sys.exit(bool({'torch', 'transformers', 'polars'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


# --- keys -----------------------------------------------------------------------------------------------------------


@every_key
def test_a_missing_key_is_named(place: tuple[str, ...]) -> None:
    set_value(place, ...)
    assert problems() == [
        f"{'.'.join(place)}: missing; the code holds no defaults, so write it (git show HEAD:params.yaml has one)"
    ]


def test_a_workload_that_lacks_nearly_all_keys_is_one_line_that_says_where_they_are() -> None:
    """Bug: nineteen lines, each of which sent its reader to a file that has no such workload."""
    set_value(("benchmark", "workloads", "mine"), {"prompts": "eval"})
    (line,) = problems()
    assert line.startswith("benchmark.workloads.mine lacks ") and "num_prompts" in line
    assert line.endswith("give that an anchor (eval: &eval), and write mine: {<<: *eval, ...} with what differs")


NAMED_BY_USER = {
    ("train_draft", "checkpoints"),
    ("benchmark", "workloads"),
    ("prepare_prompts", "sets"),
    ("schedule", "stages"),
}
SECTIONS = sorted({place[:depth] for place in LEAVES for depth in range(len(place))} - NAMED_BY_USER)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: ".".join(section) or "top")
def test_an_unknown_key_is_named_with_the_known_ones(section: tuple[str, ...]) -> None:
    set_value((*section, "zebra"), "green")
    inside = READ
    for part in section:
        inside = inside[part]
    key, known = ".".join([*section, "zebra"]), ", ".join(inside)
    assert problems() == [f"{key}: unknown key; known keys are {known}. Correct the spelling, or leave the key out"]


def test_a_misspelt_key_is_one_line_with_the_missing_one() -> None:
    """Bug: two lines for one mistake, of which one said to write the key and the other to leave it out.

    Of a misspelt section DVC would drop the stage without a word.
    """
    edited(
        ("train_draft:", "trian_draft:"),
        ("min_tau:", "min_tua:"),
        ("concurrency: 1 ", "colour: green\n      concurency: 1 "),
        ("device: cpu", "# device: cpu"),
    )
    found = problems()
    assert [line for line in found if "rename" in line] == [
        "check_overfit.min_tua: unknown key, and min_tau is missing (did you mean min_tau?); rename it",
        "benchmark.workloads.eval.concurency: unknown key, and concurrency is missing (did you mean concurrency?); rename it",
        "trian_draft: unknown key, and train_draft is missing (did you mean train_draft?); rename it",
    ]
    assert [line.split(";")[0] for line in found if "rename" not in line] == [
        "target.device: missing",
        "benchmark.workloads.eval.colour: unknown key",
    ]


def test_two_misspellings_of_one_key_are_not_both_renamed() -> None:
    edited(("  min_tau: 6.0", "  min_tua: 6.0\n  min_atu: 6.0"))
    assert [line.split(";")[0] for line in problems()] == [
        "check_overfit.min_tua: unknown key, and min_tau is missing (did you mean min_tau?)",
        "check_overfit.min_atu: unknown key (did you mean min_tau?)",
    ]


@pytest.mark.parametrize(
    ("found", "nearest"),
    [("lerning_rate", "learning_rate"), ("e0009", "e009"), ("t8_2_61", ""), ("e010", ""), ("colour", "")],
)
def test_the_nearest_name_is_suggested_and_none_with_another_number(found: str, nearest: str) -> None:
    known = ["learning_rate", "warmup_steps", "e003", "e009", "t8_2_16"]
    assert suggest_name(found, known) == (f" (did you mean {nearest}?)" if nearest else "")


@pytest.mark.parametrize(
    "model", ["/nowhere/qwen", "./qwen", "../qwen", "~/qwen", "qwen", "our/models/qwen", "-/qwen", "our/qwen/"]
)
def test_a_target_folder_that_is_missing_is_named_before_any_stage(model: str) -> None:
    """Bug: it was looked for on Hugging Face, after fix_data had run, and the message was about the network."""
    set_value(("target", "model"), model)
    with pytest.raises(ValueError, match=rf"^params\.yaml: target\.model is {model}, expected a folder, found none"):
        checks.check_target(schema.load_params())


def test_a_misspelt_target_folder_is_told_from_a_hugging_face_id_by_what_is_watched() -> None:
    Path("models/my_target").mkdir(parents=True)
    edited(("model: builtin/weather-tiny ", "model: models/my_traget "), ("watch: data/nothing ", "watch: models "))
    with pytest.raises(ValueError, match=r"models/my_traget, .* found none there \(did you mean models/my_target\?\)"):
        checks.check_target(schema.load_params())
    edited(("model: builtin/weather-tiny ", "model: models/my_traget "))
    checks.check_target(schema.load_params())  # may be an id
    edited(("model: builtin/weather-tiny ", "model: models/my_target "), ("watch: data/nothing ", "watch: models "))
    checks.check_target(schema.load_params())
    edited(("model: builtin/weather-tiny ", "model: Qwen/Qwen3-8B "), ("watch: data/nothing ", "watch: models "))
    checks.check_target(schema.load_params())


def test_cuda_without_a_gpu_is_refused_before_any_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: `device: cuda` on a machine without CUDA ended in a traceback of torch, after the data had been made."""
    set_value(("target", "device"), "cuda")
    monkeypatch.setattr(gpus, "GPU_DEVICES", ("/nowhere/*",))
    monkeypatch.setattr(gpus.shutil, "which", lambda name: None)
    with pytest.raises(
        ValueError, match=r"target\.device is cuda, expected a GPU, found none .*; set target\.device: cpu"
    ):
        checks.check_target(schema.load_params())
    for runner in ("workers", "ray"):  # other hosts may have one
        set_value(("target", "device"), "cuda")
        other = schema.load_params()
        checks.check_target(other.model_copy(update={"schedule": other.schedule.model_copy(update={"runner": runner})}))
    monkeypatch.setattr(gpus.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    checks.check_target(schema.load_params())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES"):
        checks.check_target(schema.load_params())


def test_a_misspelt_key_gets_the_nearest_known_one() -> None:
    set_value(("train_draft", "lerning_rate"), 0.1)
    assert problems()[0].startswith(
        "train_draft.lerning_rate: unknown key (did you mean learning_rate?); known keys are"
    )


def test_a_key_that_is_no_text_is_refused_at_the_top_too() -> None:
    Path("params.yaml").write_text(REAL + "\n5: x\n")
    assert problems()[0].startswith("5: expected a name (a letter, then letters, digits and _), found 5; YAML reads")


def test_every_problem_is_told_at_once() -> None:
    edited(("seed: 7", "seed: -7"), ("dtype: float32 ", "dtype: float8 "), ("max_chars:", "max_char:"))
    assert [line.split(":")[0] for line in problems()] == [
        "target.dtype", "prepare_target.seed", "fix_data.max_char",
    ]  # fmt: skip


# --- values ---------------------------------------------------------------------------------------------------------


UNTIL = ("benchmark", "workloads", "eval", "until")
MAPPINGS = {UNTIL, ("fix_data", "columns")}  # null or a mapping


@pytest.mark.parametrize("place", [place for place in LEAVES if place not in MAPPINGS], ids=".".join)
def test_a_mapping_is_no_value_of_any_other_key(place: tuple[str, ...]) -> None:
    set_value(place, {"a": 1})
    (line,) = problems()
    assert line.startswith(".".join(place) + ": expected ") and "found {'a': 1}" in line


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ({"a": 1}, ".a: unknown key; known keys are half_width, most_repeats"),
        ({"half_width": 0.05}, ".most_repeats: missing"),
        ({"half_width": 0, "most_repeats": 8}, ".half_width: expected greater than 0"),
        ({"half_width": 0.05, "most_repeats": 2}, ".most_repeats: expected "),
        (0.05, ": expected "),
    ],
)
def test_until_is_a_half_width_and_a_budget_of_three_repeats_and_more(value: Any, found: str) -> None:
    set_value(UNTIL, value)
    assert any(line.startswith(".".join(UNTIL) + found) for line in problems()), problems()


def set_values(values: dict[tuple[str, ...], Any]) -> None:
    """As `set_value`, of several keys at once."""
    whole = YAML(typ="safe").load(REAL)
    for place, value in values.items():
        section = whole
        for part in place[:-1]:
            section = section[part]
        section[place[-1]] = value
    with Path("params.yaml").open("w") as file:
        YAML(typ="safe").dump(whole, file)


def test_the_budget_is_no_less_than_the_fewest_repeats() -> None:
    set_values({UNTIL: {"half_width": 0.05, "most_repeats": 4}, (*UNTIL[:-1], "repeats"): 5})
    assert problems() == ["benchmark.workloads.eval: until.most_repeats is 4, expected at least repeats, 5, the fewest"]


def test_a_served_workload_repeats_until_only_beside_its_own_baseline() -> None:
    until: dict[tuple[str, ...], Any] = {UNTIL: {"half_width": 0.05, "most_repeats": 8}}
    set_values(until)
    assert schema.load_params().benchmark.workloads["eval"].fewest_repeats == 3
    until[("benchmark_served", "workloads")] = ["eval"]
    set_values(until)
    assert "expected benchmark_served.interleave: true" in refusal()
    set_values(until | {("benchmark_served", "interleave"): True})
    schema.load_params()


@every_number
@pytest.mark.parametrize("value", ["1", True, None, [1]], ids=["text", "true", "null", "list"])
def test_a_number_is_a_number(place: tuple[str, ...], value: Any) -> None:
    """Quoted numbers and booleans are not read as 1. Where null means something, the file's comment says what."""
    may_be_null = {
        "fix_data.max_dropped_share",
        "sample_target.train_rows",
        "sample_target.eval_rows",
        "init_draft.draft_vocab_size",
        "benchmark.workloads.eval.num_prompts",
        "benchmark.workloads.eval.concurrency",
    }
    set_value(place, value)
    if value is None and ".".join(place) in may_be_null:
        schema.load_params()
        return
    if value == [1] and place[:2] == ("benchmark", "workloads") and place[-1] in ("max_new_tokens", "concurrency"):
        schema.load_params()  # a list is a sweep
        return
    (line,) = problems()
    if value == [1] and ".".join(place) == "sample_target.temperature":  # a list is a mixture
        assert line == "sample_target.temperature.0: expected a section with temperature, weight, found 1"
        return
    assert re.fullmatch(rf"{re.escape('.'.join(place))}: expected .+, found {re.escape(repr(value))}", line)


@every_number
def test_nothing_is_negative(place: tuple[str, ...]) -> None:
    set_value(place, -1)
    (line,) = problems()
    assert re.fullmatch(rf"{re.escape('.'.join(place))}: expected greater than (or equal to )?[01], found -1", line)


@every_number
def test_zero_is_refused_but_where_it_means_something(place: tuple[str, ...]) -> None:
    set_value(place, 0)
    if ".".join(place) in ZERO or place[-1] == "gpus":
        schema.load_params()
    elif place == ("sample_target", "train_rows"):  # which means something where nothing is trained
        assert problems()[0].startswith("sample_target.train_rows is 0 and init_draft.checkpoints [e000]")
    elif place[-1] == "length_range":  # which means something of random lengths only
        assert problems()[0].startswith("benchmark.workloads.eval: length_range is 0.0 with prompts: eval, expected 1")
    else:
        (line,) = problems()
        assert re.fullmatch(rf"{re.escape('.'.join(place))}: expected greater than (or equal to )?[01], found 0", line)


@pytest.mark.parametrize("number", [".nan", ".inf", "-.inf"])
def test_no_number_is_infinite(number: str) -> None:
    """Bug: a learning rate of .inf was greater than 0 and so accepted."""
    for key in ("learning_rate: 0.03", "grad_clip: 0.5", "temperature: 0.7", "min_tau: 6.0"):
        edited((key, f"{key.split(':')[0]}: {number}"))
        (line,) = problems()
        assert "expected a finite number, found " in line


@pytest.mark.parametrize(
    ("mixture", "line"),
    [
        ([], "sample_target.temperature: expected at least 1 item, found []"),
        (
            [{"temperature": 1.0}],
            "sample_target.temperature.0.weight: missing; the code holds no defaults, so write it",
        ),
        (
            [{"temperature": -1, "weight": 1}],
            "sample_target.temperature.0.temperature: expected greater than or equal to 0",
        ),
        ([{"temperature": 1, "weight": 0}], "sample_target.temperature.0.weight: expected greater than 0, found 0"),
        (
            [{"temperature": 1, "weight": 1, "top_p": 1}],
            "sample_target.temperature.0.top_p: unknown key; known keys are temperature, weight. Correct the spelling",
        ),
    ],
)
def test_a_mixture_that_is_none_is_named(mixture: list[Any], line: str) -> None:
    set_value(("sample_target", "temperature"), mixture)
    (found,) = problems()
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
    ("dtype: float32 ", "dtype: float8 ", "target.dtype: expected 'float32', 'bfloat16' or 'float16', found 'float8'"),
    ("device: cpu", "device: gpu", r"target.device: expected text matching ^(cpu|cuda(:\d+)?)$, found 'gpu'"),
    ("feature_layers: null", "feature_layers: []", "target.feature_layers: expected at least 1 item, found []"),
    ("feature_layers: null", "feature_layers: [4, 2, 3]",
     ("target.feature_layers: is [4, 2, 3], expected ids in increasing order, each once: features are stored in the order of "
      "the target's blocks, and a draft's weights follow it; write [2, 3, 4]")),
    ("feature_layers: null", "feature_layers: [2, 2, 4, 5]",
     ("target.feature_layers: is [2, 2, 4, 5], expected ids in increasing order, each once: features are stored in the order of "
      "the target's blocks, and a draft's weights follow it; write [2, 4, 5]")),
    ("feature_layers: null          # the three", "feature_layers: [2, 3, 4, 5]  # the three",
     "init_draft.feature_layers: expected at most 3 items, found [2, 3, 4, 5]"),
    ("feature_layers: null          # the three", "feature_layers: [2, 4, 3]  # the three",
     ("init_draft.feature_layers: is [2, 4, 3], expected ids in increasing order, each once: features are stored in the order of "
      "the target's blocks, and a draft's weights follow it; write [2, 3, 4]")),
    ("feature_layers: null", "feature_layers: [0, 1, 2]", "target.feature_layers.0: expected greater than 0, found 0"),
    ("trust_remote_code: false", "trust_remote_code: 'no'",
     "target.trust_remote_code: expected a valid boolean, found 'no'"),
    ("learning_rate: 0.03", "learning_rate: '3e-2'",
     "prepare_target.learning_rate: expected a valid number, found '3e-2'"),
    ("eval_share: 0.15", "eval_share: 1", "fix_data.eval_share: expected less than 1, found 1"),
    ("top_p: 1.0", "top_p: 1.1", "sample_target.top_p: expected less than or equal to 1, found 1.1"),
    ("min_tau: 6.0", "min_tau: 0.9", "check_overfit.min_tau: expected greater than or equal to 1, found 0.9"),
    ("num_draft_tokens: [4,", "num_draft_tokens: [1,",
     "replay_trees.num_draft_tokens.0: expected greater than or equal to 2, found 1"),
    ("tree_scoring: sglang          # how", "tree_scoring: vllm  # how",
     "replay_trees.tree_scoring: expected 'sglang' or 'eagle', found 'vllm'"),
    ("num_draft_tokens: [2, 4,", "num_draft_tokens: [1, 4,",
     "time_trees.num_draft_tokens.0: expected greater than or equal to 2, found 1"),
    (MEASURED, "e003\n  trees", "benchmark.checkpoints: expected a valid list, found 'e003'"),
    (MEASURED, "[]\n  trees", "benchmark.checkpoints: expected at least 1 item, found []"),
    ("title: weather-tiny", "title: ''", "report.title: expected at least 1 character, found ''"),
    (REAL[REAL.index("  title: weather-tiny") : REAL.index("\nschedule:")], "",
     "report: expected a section with title, output_dir, model_id, analysis, found None"),
    ("tables: data/tables/weather.yaml", "tables: ../weather.yaml",
     ("fix_data.tables: is ../weather.yaml, expected a YAML file in data/tables/, which DVC tracks, as "
      "data/tables/weather.yaml; put it there, or set it to null to accept any table")),
    ("output_dir: results/answers", "output_dir: results/cells",
     "report.output_dir: is results/cells, which stages write; name another folder in results/, as results/answers"),
    ("e009: {from: e003, epochs: 6}", "e009: e003",
     "train_draft.checkpoints.e009: expected a section with from, epochs, found 'e003'"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "line"), BAD_VALUES, ids=[row[1] for row in BAD_VALUES])
def test_what_was_expected_and_found(old: str, new: str, line: str) -> None:
    edited((old, new))
    assert problems() == [line]


def test_text_that_yaml_reads_as_a_number_is_told_so() -> None:
    edited(("model: builtin/weather-tiny", "model: 5"))
    (line,) = problems()
    assert line.startswith("target.model: expected text, found 5; ") and "put text in quotes" in line


def test_an_exponent_without_a_point_is_a_number() -> None:
    """PyYAML, by YAML 1.1, reads text; DVC and we read YAML 1.2."""
    edited(("learning_rate: 0.03", "learning_rate: 3e-2"))
    assert schema.load_params().prepare_target.learning_rate == 0.03


# --- trees and checkpoints ------------------------------------------------------------------------------------------

BAD_TREES = [
    (
        "8_2_16",
        "benchmark.trees.3: expected text, found 8216; YAML reads 8_2_16 as the number 8216, so begin a name with",
    ),
    ("'8_2_16'", "benchmark.trees: '8_2_16' is not the name of a tree; write t8_2_16"),
    (
        "'8_1_8'",
        "benchmark.trees: 8_1_8: at topk 1 a tree is a chain of num_steps drafts and the root, .*; write t8_1_9",
    ),
    (
        "t8_1_8",
        "benchmark.trees: t8_1_8: at topk 1 a tree is a chain of num_steps drafts and the root, .*; write t8_1_9",
    ),
    ("t8_1_10", "benchmark.trees: t8_1_10: at topk 1 .*; write t8_1_9"),
    ("t8_2_32", "benchmark.trees: t8_2_32 has 31 nodes .* = 30 candidates .*; use at most t8_2_31"),
    ("t1_4_6", "benchmark.trees: t1_4_6 has 5 nodes .* = 4 candidates .*; use at most t1_4_5"),
    (
        "t0_2_16",
        "benchmark.trees: t0_2_16: expected num_steps and topk of 1 or more, and num_draft_tokens of 2 or more",
    ),
    ("t8_0_16", "benchmark.trees: t8_0_16: expected num_steps and topk of 1 or more"),
    ("t8_2_1", "benchmark.trees: t8_2_1: .* num_draft_tokens of 2 or more"),
    ("t08_2_16", "benchmark.trees: 't08_2_16' is not the name of a tree; write t8_2_16"),
    ("t٨_2_16", "benchmark.trees: 't٨_2_16' is not a tree; write t<num_steps>_<topk>_<num_draft_tokens>, as t8_2_16"),
    ("t8_-2_16", "benchmark.trees: 't8_-2_16' is not a tree"),
    ("t8_2", "benchmark.trees: 't8_2' is not a tree"),
    ("t8_2_16_1", "benchmark.trees: 't8_2_16_1' is not a tree"),
    ("tree", "benchmark.trees: 'tree' is not a tree"),
    ("t8_2_16, t8_2_16", "benchmark.trees: t8_2_16 is listed twice; list each name once"),
]


@pytest.mark.parametrize(("tree", "message"), BAD_TREES, ids=[row[0] for row in BAD_TREES])
def test_a_tree_that_can_not_be_is_told_what_to_write(tree: str, message: str) -> None:
    """Bug: t08_2_16 and digits of other scripts were read as t8_2_16: a cell then bore another name than its tree."""
    edited(("t8_2_16,", f"{tree},"))
    (line,) = problems()
    assert re.match(message, line)


def test_the_largest_tree_can_be_built() -> None:
    edited(("t8_2_16,", "t8_2_31,"))
    assert "t8_2_31" in schema.load_params().benchmark.trees


def test_a_grid_without_one_tree_is_refused() -> None:
    """Bug: it was accepted, and replay_trees then wrote an empty table."""
    edited(
        ("num_steps: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]", "num_steps: [1]"),
        ("topk: [1, 2, 3, 4]", "topk: [2]"),
        ("[4, 6,", "[6,"),
    )
    (line,) = problems()
    assert (
        line.startswith("replay_trees: no tree of num_steps [1], topk [2] and num_draft_tokens [6, ")
        and "write smaller num_draft_tokens" in line
    )


SECOND = "e009: {from: e003, epochs: 6}"
PUBLISHED = "{model: AngelSlim/Qwen3-8B_eagle3, revision: null, rope_theta: null}"
NO_NAME = "expected a name (a letter, then letters, digits and _), found"
BAD_CHECKPOINTS = [
    (SECOND, "8_2_16: {from: e003, epochs: 6}", f"train_draft.checkpoints.8216: {NO_NAME} 8216; YAML reads 8_2_16 as"),
    (SECOND, "'009': {from: e003, epochs: 6}", f"train_draft.checkpoints.009: {NO_NAME} '009'"),
    (SECOND, "e-9: {from: e003, epochs: 6}", f"train_draft.checkpoints.e-9: {NO_NAME} 'e-9'"),
    (SECOND, "e009: {from: 3, epochs: 6}", f"train_draft.checkpoints.e009.from: {NO_NAME} 3; YAML reads"),
    (SECOND, "e009: {from: e010, epochs: 6}",
     "train_draft: checkpoints.e009.from is 'e010', expected one of e000, e003, e009"),
    (SECOND, "e009: {from: e009, epochs: 6}",
     "train_draft: checkpoints e009 -> e009 form a cycle; start one from e000"),
    ("e003: {from: e000,", "e003: {from: e009,",
     "train_draft: checkpoints e003 -> e009 -> e003 form a cycle; start one from e000"),
    ("[e000]           # []", "[] # []",
     "init_draft.checkpoints is [] and train_draft.checkpoints has e003, e009, expected [e000], which they start from"),
    ("[e000]           # []", "[e001] # []", "init_draft.checkpoints.0: expected 'e000', found 'e001'"),
    ("train_rows: 220", "train_rows: 0",
     "sample_target.train_rows is 0 and init_draft.checkpoints [e000], whose vocabulary and training need training rows"),
    (SECOND, "e000: {from: e003, epochs: 6}",
     "train_draft: checkpoints.e000 is made by init_draft; choose another name"),
    (MEASURED, "[e003, e003]\n  trees", "benchmark.checkpoints: e003 is listed twice; list each name once"),
    (MEASURED, "[e003, 9]\n  trees", "benchmark.checkpoints.1: expected text, found 9; YAML reads"),
    (MEASURED, "[e003, e010]\n  trees",
     "benchmark.checkpoints: 'e010' is not trained, expected some of e003, e009; correct it, or add it to train_draft"),
    ("[e003, e009]", "[e003, e010]", "replay_trees.checkpoints: 'e010' is not trained, expected some of e003, e009"),
    ("[e003, e009]", "[e003, e003]", "replay_trees.checkpoints: e003 is listed twice"),
    ("trace_trees: [t8_1_9,", "trace_trees: [t10_2_32,", "replay_trees.trace_trees: t10_2_32 is listed twice"),
    ("trace_trees: [t8_1_9,", "trace_trees: [t3_2_16,", "replay_trees.trace_trees: t3_2_16 has 15 nodes under the root"),
    ("[e000]           # e000", "[e001] # e000",
     "time_trees.checkpoints: 'e001' is no checkpoint, expected some of e000, e003, e009"),
    ("[e000]           # e000", "[e000, e000] # e000", "time_trees.checkpoints: e000 is listed twice"),
    ("  num_steps: [1, 3, 6, 10] ", "  num_steps: [1] ",
     "time_trees: num_steps [1], topk [1, 2, 4] and num_draft_tokens [2, 4, 8, 16, 32, 64]"),
    ("  checkpoints: {}", f"  checkpoints: {{e003: {PUBLISHED}}}", "import_draft.checkpoints.e003 is made by another stage"),
    ("  checkpoints: {}", f"  checkpoints: {{e000: {PUBLISHED}}}", "import_draft.checkpoints.e000 is made by another stage"),
    ("  checkpoints: {}", f"  checkpoints: {{'1': {PUBLISHED}}}", f"import_draft.checkpoints.1: {NO_NAME} '1'"),
    ("e003: {from: e000,", "e003: {from: theirs,", "train_draft: checkpoints.e003.from is 'theirs', expected one of"),
    ("sliding_window: null ", "sliding_window: 9 ",
     "init_draft.sliding_window is 9, expected at least the most steps asked for, 10"),
    ("revision: null                # of", "revision: main # of", "init_draft: revision is 'main', expected null while from"),
    ("draft_config_path: null ", "draft_config_path: /tmp/x.json ", "init_draft.draft_config_path: expected text matching"),
    ("min_tau: 6.0", "min_tau: 8.5",
     "check_overfit.min_tau 8.5 can't be reached: a chain of train_draft.ttt_steps = 7 drafts commits at most 8 tokens per"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "start"), BAD_CHECKPOINTS, ids=[row[1] for row in BAD_CHECKPOINTS])
def test_checkpoints_that_can_not_be_trained_or_measured(old: str, new: str, start: str) -> None:
    edited((old, new))
    (line,) = problems()
    assert line.startswith(start), line


def test_checkpoints_may_branch_and_stand_in_any_order() -> None:
    edited(
        (SECOND, "e012: {from: e009, epochs: 3}\n    e009: {from: e003, epochs: 6}\n    other: {from: e003, epochs: 1}")
    )
    assert list(schema.load_params().train_draft.checkpoints) == ["e003", "e012", "e009", "other"]


# --- other methods --------------------------------------------------------------------------------------------------

RIVALS = """e009: {from: e003, epochs: 6}
    ours: {from: e000, epochs: 2, method: eagle}
    heads: {from: e000, epochs: 2, method: medusa, heads: 4}"""
TABLE = {
    "two": "{method: eagle2, checkpoint: ours, tree: t5_2_8}",
    "three": "{method: eagle3, checkpoint: e009, tree: t5_2_8}",
    "fixed": "{method: eagle, checkpoint: ours, depth: 7, nodes: 9}",
    "medusa": "{method: medusa, checkpoint: heads, depth: 4, nodes: 9}",
}
NGRAM, AHEAD = (
    "{method: ngram, longest: 3, shortest: 1, length: 8}",
    "{method: lookahead, window: 5, level: 4, guesses: 5}",
)
FREE = f"{{ngram: {NGRAM}, lookahead: {AHEAD}}}"
EMPTY = "  with_draft: {}   ", "  without_draft: {}  "


def with_methods(*edits: tuple[str, str], rivals: str = RIVALS, free: str = FREE, **rows: str) -> None:
    drafted = "{" + ", ".join(f"{name}: {row}" for name, row in {**TABLE, **rows}.items()) + "}"
    edited((SECOND, rivals), (EMPTY[0], f"  with_draft: {drafted} "), (EMPTY[1], f"  without_draft: {free} "), *edits)


def test_every_method_can_be_named() -> None:
    with_methods()
    found = schema.load_params()
    assert {name: segment.other_method for name, segment in found.train_draft.checkpoints.items()} == {
        "e003": None, "e009": None, "ours": "eagle", "heads": "medusa",
    }  # fmt: skip
    kinds = {name: type(found.get_method_row(name)).__name__ for name in [*TABLE, "ngram", "lookahead"]}
    assert kinds == {
        "two": "DynamicRow", "three": "DynamicRow", "fixed": "StaticRow", "medusa": "StaticRow", "ngram": "NgramRow",
        "lookahead": "LookaheadRow",
    }  # fmt: skip
    with pytest.raises(ValueError, match="benchmark_methods has no 'hydra'; it has two, three, fixed"):
        found.get_method_row("hydra")


def test_a_segment_may_say_that_it_is_eagle_3s() -> None:
    edited((SECOND, "e009: {from: e003, epochs: 6, method: eagle3}"))
    assert schema.load_params().train_draft.checkpoints["e009"].other_method is None


BAD_RIVALS = [
    ("method: eagle}", "method: hydra}",
     "train_draft.checkpoints.ours.method: expected 'eagle3', 'eagle', 'medusa', 'dflash', 'dflash2' or 'dspark', found"),
    (", heads: 4}", "}", "train_draft.checkpoints.heads.heads: missing; the code holds no defaults"),
    (", heads: 4}", ", heads: 0}", "train_draft.checkpoints.heads.heads: expected greater than 0, found 0"),
    ("method: eagle}", "method: eagle, heads: 4}",
     "train_draft.checkpoints.ours.heads: unknown key; known keys are from, epochs"),
    ("ours: {from: e000", "ours: {from: e003",
     "train_draft: checkpoints.ours is of eagle and starts from e003, which is of eagle3; expected one method: start it"),
    ("heads: {from: e000", "more: {from: heads, epochs: 1, method: medusa, heads: 5}\n    heads: {from: e000",
     "train_draft: checkpoints.more is of 5 heads of medusa and starts from heads, which is of 4 heads of medusa"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "start"), BAD_RIVALS, ids=[row[1] for row in BAD_RIVALS])
def test_segments_of_methods_that_can_not_be_trained(old: str, new: str, start: str) -> None:
    with_methods(rivals=RIVALS.replace(old, new))
    assert any(line.startswith(start) for line in problems()), problems()


BLOCKS = """e009: {from: e003, epochs: 6}
    flash: {from: e000, epochs: 2, method: dflash, layers: 2, block_size: 8, anchors: 64}
    more: {from: flash, epochs: 2, method: dflash, layers: 2, block_size: 8, anchors: 32, decay: 3.0}
    spark: {from: e000, epochs: 2, method: dspark, layers: 1, block_size: 7, anchors: 64, markov_rank: 32}
    spark2: {from: spark, epochs: 2, method: dspark, layers: 1, block_size: 7, anchors: 64, markov_rank: 32}"""
MORE, SPARK2 = BLOCKS.split("\n")[2].strip(), BLOCKS.split("\n")[4].strip()


def test_segments_of_a_block_draft_may_differ_in_what_is_learned() -> None:
    edited((SECOND, BLOCKS))
    found = schema.load_params().train_draft.checkpoints
    assert [(found[n].other_method, found[n].is_only_compared) for n in ("more", "spark2")] == [
        ("dflash", False), ("dspark", False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("segment", "old", "new", "start"),
    [
        (MORE, "layers: 2", "layers: 3",
         "checkpoints.more.layers is 3, but 2 in flash, which it starts from; expected one draft: write layers: 2, or start it"),
        (MORE, "block_size: 8", "block_size: 9", "checkpoints.more.block_size is 9, but 8 in flash"),
        (MORE, "anchors: 32", "anchors: 32, feature_layers: [1, 2]",
         "checkpoints.more.feature_layers is [1, 2], but null in flash"),
        (MORE, "anchors: 32", "anchors: 32, mask_token_id: 0", "checkpoints.more.mask_token_id is 0, but null in flash"),
        (SPARK2, "markov_rank: 32", "markov_rank: 16", "checkpoints.spark2.markov_rank is 16, but 32 in spark"),
        (SPARK2, "from: spark", "from: flash", "checkpoints.spark2 is of dspark and starts from flash, which is of dflash"),
        (SPARK2, "from: spark", "from: e003", "checkpoints.spark2 is of dspark and starts from e003, which is of eagle3"),
    ],
)  # fmt: skip
def test_segments_of_a_chain_are_of_one_block_draft(segment: str, old: str, new: str, start: str) -> None:
    edited((SECOND, BLOCKS.replace(segment, segment.replace(old, new))))
    assert [line for line in problems() if line.startswith(f"train_draft: {start}")], problems()


BAD_ROWS = [
    ({"two": "{method: eagle9, checkpoint: ours, tree: t5_2_8}"},
     "benchmark_methods.with_draft.two.method: expected 'eagle3', 'eagle2', 'eagle' or 'medusa', found 'eagle9'"),
    ({"two": "{method: ngram, longest: 2, shortest: 1, length: 4}"},
     "benchmark_methods.with_draft.two.method: expected 'eagle3'"),
    ({"two": "{method: eagle2, checkpoint: ours, tree: t5_2_99}"},
     "benchmark_methods.with_draft.two.tree: t5_2_99 has 98 nodes"),
    ({"two": "{method: eagle2, checkpoint: e009, tree: t5_2_8}"},
     "benchmark_methods.with_draft.two.checkpoint 'e009' is of eagle3, expected one of eagle (ours); correct it, or add one to"),
    ({"three": "{method: eagle3, checkpoint: heads, tree: t5_2_8}"},
     "benchmark_methods.with_draft.three.checkpoint 'heads' is of medusa, expected one of eagle3 (e003, e009, e000)"),
    ({"medusa": "{method: medusa, checkpoint: m5, depth: 4, nodes: 9}"},
     "benchmark_methods.with_draft.medusa.checkpoint 'm5' is no checkpoint, expected one of medusa (heads)"),
    ({"medusa": "{method: medusa, checkpoint: heads, depth: 5, nodes: 9}"},
     "benchmark_methods.with_draft.medusa.depth is 5, expected at most 4, the heads of heads: deeper guesses are not measured"),
    ({"fixed": "{method: eagle, checkpoint: ours, depth: 8, nodes: 9}"},
     "benchmark_methods.with_draft.fixed.depth is 8, expected at most 7, train_draft.ttt_steps"),
    ({"fixed": "{method: eagle, checkpoint: ours, depth: 2, nodes: 1}"},
     "benchmark_methods.with_draft.fixed.nodes: expected greater than or equal to 2, found 1"),
    ({"ngram": "{method: eagle3, checkpoint: e009, tree: t5_2_8}"},
     "benchmark_methods: ngram is in with_draft and in without_draft"),
]  # fmt: skip


def test_a_sweep_is_no_workload_of_methods() -> None:
    """Bug: benchmark_methods took a workload of several answer lengths, and ended by an AssertionError."""
    with_methods(("max_new_tokens: 200       # toy; 8B: 512", "max_new_tokens: [100, 200]  # toy; 8B: 512"))
    (line,) = problems()
    assert line.startswith(
        "benchmark_methods.workload is 'eval', whose max_new_tokens is a sweep, [100, 200]; expected one"
    )


def test_a_window_below_the_steps_of_a_row_of_methods() -> None:
    """Bug: the trees of benchmark_methods.with_draft were not among those that init_draft.sliding_window is compared with."""
    with_methods(
        ("sliding_window: null ", "sliding_window: 11 "), three="{method: eagle3, checkpoint: e009, tree: t12_2_8}"
    )
    (line,) = problems()
    assert line.startswith("init_draft.sliding_window is 11, expected at least the most steps asked for, 12")


@pytest.mark.parametrize(("rows", "start"), BAD_ROWS, ids=[row[1] for row in BAD_ROWS])
def test_rows_of_methods_that_can_not_be_measured(rows: dict[str, str], start: str) -> None:
    with_methods(**rows)
    assert any(line.startswith(start) for line in problems()), problems()


def test_rows_without_a_draft_are_checked_too() -> None:
    wrong = NGRAM.replace("longest: 3, shortest: 1", "longest: 1, shortest: 2"), AHEAD.replace("level: 4", "level: 1")
    with_methods(free="{{ngram: {}, a: {}}}".format(*wrong))
    assert problems() == [
        "benchmark_methods.without_draft.ngram: shortest is 2, expected at most longest, 1; lower it",
        "benchmark_methods.without_draft.a.level: expected greater than or equal to 2, found 1",
    ]


def test_the_table_of_methods_asks_what_the_torch_engine_decodes() -> None:
    with_methods(("  workload: eval   ", "  workload: chat   "))
    (line,) = problems()
    assert line.startswith(
        "benchmark_methods.workload is 'chat', expected one of benchmark.torch_workloads, eval; correct it"
    )


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        (MEASURED, "[heads]\n  trees", "benchmark.checkpoints"),
        ("[e003, e009]", "[heads]", "replay_trees.checkpoints"),
        ("[e000]           # e000", "[heads] # e000", "time_trees.checkpoints"),
    ],
)
def test_eagle_and_medusa_checkpoints_are_not_replayed_timed_or_benchmarked_with_trees(
    old: str, new: str, key: str
) -> None:
    with_methods((old, new))
    (line,) = problems()
    assert line.startswith(
        f"{key}: 'heads' is of medusa, expected checkpoints of EAGLE-3 or block drafts; name it in benchmark_methods"
    )


def test_a_window_and_q_k_norms_are_what_no_engine_loads_together() -> None:
    edited(("qk_norm: false ", "qk_norm: true "), ("sliding_window: null ", "sliding_window: 64 "))
    (line,) = problems()
    assert line.startswith("init_draft: qk_norm is true and sliding_window is 64, expected one of the two")


def test_a_published_draft_may_be_replayed_and_measured() -> None:
    imported = f"  checkpoints: {{theirs: {PUBLISHED}}}"
    edited(("  checkpoints: {}", imported), ("[e003, e009]", "[theirs]"), (MEASURED, "[theirs]\n  trees"))
    p = schema.load_params()
    assert p.get_making_stage("theirs") == "import_draft@theirs" and p.get_making_stage("e003") == "train_draft@e003"


def test_the_reachable_min_tau_is_accepted() -> None:
    edited(("min_tau: 6.0", "min_tau: 8"))
    assert schema.load_params().check_overfit.min_tau == 8


# --- workloads and prompt sets ---------------------------------------------------------------------------------------


def workload(**changes: Any) -> dict[str, Any]:
    return {**YAML(typ="safe").load(REAL)["benchmark"]["workloads"]["eval"], **changes}


RANDOM = {"prompts": "random", "input_tokens": 512, "concurrency": 64, "length_range": 0.5}
BAD_WORKLOADS = [
    ({"prompts": "mtbench"}, "benchmark.workloads.chat.prompts is 'mtbench' (did you mean mt_bench?), expected"),
    ({"grade": True}, "benchmark.workloads.chat.grade is true with prompts: eval, expected a set of format gsm8k, humaneval"),
    ({"prompts": "alpaca", "grade": True}, "benchmark.workloads.chat.grade is true with prompts: alpaca, expected a set of"),
    ({"input_tokens": 5}, "benchmark.workloads.chat: input_tokens is 5 with prompts: eval, expected a number for random"),
    ({**RANDOM, "input_tokens": None}, "benchmark.workloads.chat: input_tokens is None with prompts: random"),
    ({**RANDOM, "num_prompts": None}, "benchmark.workloads.chat: num_prompts is null with prompts: random, expected a number"),
    ({"start": 4, "stop": 4}, "benchmark.workloads.chat: stop is 4, expected more than start, 4"),
    ({"request_rate": "slow"}, "benchmark.workloads.chat.request_rate: expected 'inf', found 'slow'"),
    ({"request_rate": 0}, "benchmark.workloads.chat.request_rate: expected greater than 0, found 0"),
    ({"concurrency": [1, 0]}, "benchmark.workloads.chat.concurrency.1: expected greater than 0, found 0"),
    ({"max_new_tokens": []}, "benchmark.workloads.chat.max_new_tokens: expected at least 1 item, found []"),
    ({"turns": "second"}, "benchmark.workloads.chat.turns: expected 'first' or 'all', found 'second'"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "start"), BAD_WORKLOADS, ids=[row[1][24:60] for row in BAD_WORKLOADS])
def test_a_workload_that_can_not_be_asked(changes: dict[str, Any], start: str) -> None:
    set_value(("benchmark", "workloads", "chat"), workload(**changes))
    (line,) = problems()
    assert line.startswith(start), line


def test_the_torch_engine_waits_for_no_arrivals() -> None:
    set_value(("benchmark", "workloads", "eval"), workload(request_rate=8.0))
    (line,) = problems()
    assert line.startswith("benchmark: torch_workloads: workload eval has request_rate 8.0 (expected inf)")


@pytest.mark.parametrize(
    ("changes", "alone"),
    [
        ({}, True), ({"concurrency": 2}, False), ({"concurrency": [1]}, False), ({"concurrency": None}, False),
        ({"max_new_tokens": [10, 20]}, False), ({"ignore_eos": True}, False), ({**RANDOM, "concurrency": 1}, False),
    ],
)  # fmt: skip
def test_one_prompt_at_a_time_has_cells_of_its_own(changes: dict[str, Any], alone: bool) -> None:
    set_value(("benchmark", "workloads", "eval"), workload(**changes))
    assert schema.load_params().benchmark.workloads["eval"].is_sequential == alone


def test_gpus_are_shared_out_among_whole_copies_of_the_target() -> None:
    two = ("num_gpus_total: 1 ", "num_gpus_total: 6 "), ("num_gpus_per_model: 1 ", "num_gpus_per_model: 2 ")
    edited(*two, ("device: cpu ", "device: cuda "))
    assert schema.load_params().benchmark.processes == 3
    edited(*two)
    (line,) = problems()
    assert line.startswith(
        "benchmark.num_gpus_per_model is 2 with target.device cpu, expected 1: a target is divided over GPUs only"
    )
    edited(("num_gpus_total: 1 ", "num_gpus_total: 6 "), ("num_gpus_per_model: 1 ", "num_gpus_per_model: 4 "))
    (line,) = problems()
    assert line.startswith("benchmark: num_gpus_total is 6, expected a multiple of num_gpus_per_model, 4, the GPUs")


def test_a_sweep_is_every_pair_of_length_and_concurrency() -> None:
    changes = {"max_new_tokens": [10, 128], "concurrency": [1, 4], "request_rate": "inf"}
    set_value(("benchmark", "workloads", "sweep"), workload(**changes))
    found = schema.load_params().benchmark.workloads
    assert found["sweep"].list_loads() == [(10, 1), (10, 4), (128, 1), (128, 4)]
    assert found["eval"].list_loads() == [(200, 1)] and found["eval"].requests_per_second == float("inf")


def test_the_sets_and_scenarios_of_the_docs_are_accepted() -> None:
    text = (ROOT / "docs/workloads.md").read_text(encoding="utf-8")
    sets, scenarios, sweep = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    given = YAML(typ="safe").load(scenarios.replace("benchmark_served:", sweep + "benchmark_served:"))
    whole = YAML(typ="safe").load(REAL)
    whole["prepare_prompts"]["sets"] |= YAML(typ="safe").load(sets)["prepare_prompts"]["sets"]
    whole["benchmark"]["workloads"] |= given["benchmark"]["workloads"]
    whole["benchmark_served"] |= given["benchmark_served"]
    with Path("params.yaml").open("w") as file:
        YAML(typ="safe").dump(whole, file)
    found = schema.load_params().benchmark.workloads
    # Seed 002, 2.2: prompts, input and output lengths, requests a second, under way at once.
    assert {
        name: (w.num_prompts, w.input_tokens, w.list_loads(), w.requests_per_second)
        for name, w in found.items()
        if name != "eval"
    } == {
        "code_gen": (128, 512, [(1024, 64)], float("inf")),
        "chat": (128, 256, [(256, 32)], 8.0),
        "completion": (256, 1024, [(128, 128)], float("inf")),
        "when_not": (512, 256, [(n, 2**c) for n in (10, 20, 128, 1024) for c in range(9)], float("inf")),
    }


FILE = {"from": "data/prompt_sets/a.jsonl", "name": None, "split": None, "revision": None, "format": "gsm8k"}
BAD_SETS = [
    (
        "math",
        {"split": "test"},
        "from is the file data/prompt_sets/a.jsonl, expected name, split and revision to be null",
    ),
    (
        "math",
        {"from": "elsewhere/a.jsonl"},
        "from is elsewhere/a.jsonl, expected a file or folder in data/prompt_sets/",
    ),
    (
        "math",
        {"from": "data/prompt_sets/../a.json"},
        "from is data/prompt_sets/../a.json, expected a file or folder in",
    ),
    ("math", {"from": "./gsm8k", "split": "test"}, "from is ./gsm8k, expected a file or folder in data/prompt_sets/"),
    ("math", {"from": "/sets/gsm8k", "split": "test"}, "or a dataset's id (owner/name); put it there"),
    ("math", {"from": "openai/gsm8k"}, "from is the dataset openai/gsm8k, expected split to say which part of it"),
    ("math", {"format": "mmlu"}, "expected 'mt_bench', 'gsm8k', 'humaneval', 'alpaca' or 'math500', found 'mmlu'"),
    ("eval", {}, "sets.eval: eval and random are reserved; choose another name"),
]


@pytest.mark.parametrize(("name", "changes", "says"), BAD_SETS, ids=[row[2][:40] for row in BAD_SETS])
def test_a_prompt_set_that_can_not_be_read(name: str, changes: dict[str, Any], says: str) -> None:
    set_value(("prepare_prompts", "sets", name), {**FILE, **changes})
    (line,) = problems()
    assert line.startswith("prepare_prompts") and says in line


def test_a_dataset_of_the_hub_has_a_configuration_a_split_and_a_commit() -> None:
    hub = {"from": "openai/gsm8k", "name": "main", "split": "test", "revision": "a" * 40, "format": "gsm8k"}
    set_value(("prepare_prompts", "sets", "gsm8k"), hub)
    found = schema.load_params().prepare_prompts.sets
    assert not found["gsm8k"].is_file and found["gsm8k"].can_be_graded
    assert found["alpaca"].is_file and not found["alpaca"].can_be_graded


# --- the file itself ------------------------------------------------------------------------------------------------


def line_of(text: str) -> int:
    return next(n for n, line in enumerate(REAL.splitlines(), 1) if line.startswith(text))


@pytest.mark.parametrize("key", ["seed: 7", "e003: {from: e000, epochs: 3}"])
def test_a_key_given_twice_is_refused_with_its_line(key: str) -> None:
    """Most parsers take the last one in silence."""
    indent = re.search(rf"^( *){re.escape(key)}", REAL, re.MULTILINE)[1]  # type: ignore[index]
    edited((key, f"{key}\n{indent}{key}"))
    where = line_of(indent + key) + 1
    assert refusal().startswith(
        f'params.yaml is not valid YAML: line {where}: found duplicate key "{key.split(":")[0]}"'
    )
    assert "http" not in refusal() and "\n" not in refusal()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (REAL.replace("  seed: 7", "\tseed: 7", 1).encode(), f"line {line_of('  seed: 7')}: "),
        (REAL.encode() + b"\n[", r"line \d+: could not find expected"),
        (b"target: \xff", "'utf-8' codec"),
        (b"target: 2026-13-01", "month must be in 1..12"),
        (b"a: 1\n---\nb: 1", "line 2: "),
        (b"!!python/object:os.system {}", "line 1: could not determine a constructor"),
    ],
    ids=["tab", "rest", "no UTF-8", "no such day", "two documents", "python object"],
)
def test_invalid_yaml_is_one_line_that_says_where(content: bytes, says: str) -> None:
    Path("params.yaml").write_bytes(content)
    message = refusal()
    assert re.match(rf"params\.yaml is not valid YAML: ({says})", message), message
    assert message.endswith("; correct it") and "\n" not in message


@pytest.mark.parametrize(("text", "found"), [("", "None"), ("hello", "'hello'"), ("- 1", r"\[1\]")])
def test_a_file_that_is_no_mapping_is_told_the_sections(text: str, found: str) -> None:
    Path("params.yaml").write_text(text)
    assert re.fullmatch(
        rf"params\.yaml: expected the sections target, prepare_target, .*, report, schedule; found {found}", refusal()
    )


def test_a_missing_file_says_where_to_run() -> None:
    Path("params.yaml").unlink()
    assert refusal() == "params.yaml not found; run from the project's root, the folder of dvc.yaml"
    Path("params.yaml").mkdir()
    assert "not found" in refusal()


# --- what the file alone can't know ---------------------------------------------------------------------------------


def test_a_missing_raw_file_is_named_before_any_work() -> None:
    p = schema.load_params()
    with pytest.raises(
        ValueError, match=r"^params\.yaml: fix_data\.raw is data/raw/weather_toon\.jsonl, .*; give a file or"
    ):
        checks.check_raw_exists(p)
    Path(p.fix_data.raw).mkdir(parents=True)
    checks.check_raw_exists(p)
    Path(p.fix_data.raw).rmdir()
    Path(p.fix_data.raw).touch()
    checks.check_raw_exists(p)


def test_an_eval_file_is_in_the_folder_or_the_file_itself() -> None:
    edited(("eval_file: null", "eval_file: test.jsonl"))
    Path("data/raw").mkdir(parents=True)
    raw, test = Path("data/raw/weather_toon.jsonl"), Path("data/raw/test.jsonl")
    raw.touch()
    test.touch()  # beside the raw file, where DVC would not see it change
    with pytest.raises(ValueError, match=r"fix_data\.eval_file is test\.jsonl, expected a file in the folder"):
        checks.check_raw_exists(schema.load_params())
    edited(("raw: data/raw/weather_toon.jsonl", "raw: data/raw"), ("eval_file: null", "eval_file: test.jsonl"))
    p = schema.load_params()
    checks.check_raw_exists(p)
    assert p.fix_data.eval_path() == test
    edited(("eval_file: null", "eval_file: weather_toon.jsonl"))
    p = schema.load_params()
    checks.check_raw_exists(p)
    assert p.fix_data.eval_path() == raw


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("eval_rows: null", "eval_rows: 100", "fix_data: eval_rows is 100, expected null while eval_file is null"),
        ("min_chars: 1 ", "min_chars: 9000 ", "fix_data: min_chars 9000 is above max_chars 8000; lower it"),
        (
            "near_duplicate_threshold: null",
            "near_duplicate_threshold: 0.2",
            "fix_data.near_duplicate_threshold: expected",
        ),
    ],
)
def test_keys_of_fix_data_that_disagree(old: str, new: str, message: str) -> None:
    edited((old, new))
    assert problems()[0].startswith(message)


def test_a_draft_vocabulary_larger_than_the_targets_is_refused() -> None:
    p = schema.load_params()
    assert p.init_draft.draft_vocab_size == 320
    checks.check_draft_vocab(p, 320)
    with pytest.raises(
        ValueError, match=r"^params\.yaml: init_draft\.draft_vocab_size is 320, but .* has 319 tokens; use at most 319"
    ):
        checks.check_draft_vocab(p, 319)
    edited(("draft_vocab_size: 320", "draft_vocab_size: null"))
    checks.check_draft_vocab(schema.load_params(), 1)


# --- trees, counted -------------------------------------------------------------------------------------------------


def expansion(steps: int, topk: int) -> list[tuple[int, ...]]:
    """Every node recorded while a tree grows as SGLang's does: the topk best of a level have topk children each."""
    chance, score = random.Random(0), {(): 0.0}
    frontier: list[tuple[int, ...]] = [()]
    recorded: list[tuple[int, ...]] = []
    for _ in range(steps):
        children = [(*node, child) for node in frontier for child in range(topk)]
        score |= {child: score[child[:-1]] + chance.random() for child in children}
        recorded += children
        frontier = sorted(children, key=lambda node: score[node])[-topk:]
    return recorded


@pytest.mark.parametrize("steps", range(1, 9))
@pytest.mark.parametrize("topk", range(1, 6))
def test_candidates_are_the_nodes_an_expansion_records(steps: int, topk: int) -> None:
    nodes = expansion(steps, topk)
    assert count_candidates(steps, topk) == len(nodes) == len(set(nodes))


@given(st.integers(1, 12), st.integers(1, 8), st.integers(0, 10_000))
def test_a_tree_that_can_be_built_comes_back_from_its_name(steps: int, topk: int, draw: int) -> None:
    most = len(expansion(steps, topk)) + 1
    tokens = most if topk == 1 else 2 + draw % (most - 1)
    name = f"t{steps}_{topk}_{tokens}"
    tree = TreeShape.parse(name)
    assert (tree.num_steps, tree.topk, tree.num_draft_tokens, tree.name) == (steps, topk, tokens, name)
    with pytest.raises(ValueError, match=f"t{steps}_{topk}_{most}$"):  # it says which is the largest
        TreeShape.parse(f"t{steps}_{topk}_{most + 1}")


@given(st.text(alphabet="t0123456789_٣ \n", max_size=12))
def test_a_name_that_is_accepted_is_the_trees_own(name: str) -> None:
    """One tree, one name: it is in the cell's path, in dvc.lock and in the report."""
    try:
        tree = TreeShape.parse(name)
    except ValueError:
        return
    assert tree.name == name


def test_the_replay_grid_is_every_tree_that_can_be_built() -> None:
    """Asked of Tree.parse, one by one; at topk 1 the chain of each length."""
    grid = schema.load_params().replay_trees
    expected = {f"t{s}_1_{s + 1}" for s in grid.num_steps}
    for s in grid.num_steps:
        for k in set(grid.topk) - {1}:
            for m in grid.num_draft_tokens:
                try:
                    expected.add(TreeShape.parse(f"t{s}_{k}_{m}").name)
                except ValueError:
                    assert m - 1 > len(expansion(s, k))
    found = [tree.name for tree in grid.list_trees()]
    assert set(found) == expected and len(found) == len(expected) > 100


# --- the command ----------------------------------------------------------------------------------------------------


def command(home: Path) -> subprocess.CompletedProcess:
    """`python -m stages.params.checks`, as `make run` calls it before anything starts."""
    return subprocess.run(
        [sys.executable, "-m", "stages.params.checks"],
        cwd=home,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_the_command_says_what_it_checked(home: Path) -> None:
    Path("data/raw").mkdir(parents=True)
    Path("data/raw/weather_toon.jsonl").touch()
    done = command(home)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout == "params.yaml is valid: target builtin/weather-tiny, 2 checkpoints, 8 cells\n"


def test_the_command_refuses_with_the_message_and_no_traceback(home: Path) -> None:
    done = command(home)  # the raw file is not there
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.startswith("aerie: params.yaml: fix_data.raw is")
    edited(("num_threads:", "num_thread:"))
    done = command(home)
    assert (done.returncode, done.stdout) == (1, "") and done.stderr == f"aerie: {refusal()}\n"
    assert "target.num_thread: unknown key" in done.stderr and "Traceback" not in done.stderr


def test_a_range_of_ports_is_servers_of_sample_target_and_of_no_cell() -> None:
    """Bug: the pattern for one server stood at both, so the list that docs/sampling.md shows was refused."""
    set_value(("sample_target", "server", "base_urls"), ["http://gpu1:8000", "http://gpu2:6000-6007"])
    assert schema.load_params().sample_target.server.base_urls[1] == "http://gpu2:6000-6007"
    set_value(("benchmark_served", "server", "base_urls"), {"baseline": "http://gpu2:6000-6007"})
    assert "benchmark_served.server.base_urls.baseline: expected text matching" in refusal()


NOTHING = "data/nothing"


def test_a_local_folder_that_dvc_does_not_watch_is_refused_and_an_id_needs_no_watch(tmp_path: Path) -> None:
    """Bug: DVC knew a local folder's name only, so other weights in it reran nothing."""
    draft = tmp_path / "drafts/one"
    draft.mkdir(parents=True)
    for model, watch in ((None, NOTHING), ("someone/draft", NOTHING), (draft, draft), (draft, tmp_path / "drafts")):
        checks.check_watched(
            "import_draft.checkpoints.one.model", model and str(model), "import_draft.watch", str(watch)
        )
    for watch in (NOTHING, str(tmp_path / "dra"), str(draft / "below")):
        with pytest.raises(ValueError, match=r"expected import_draft\.watch to be that folder or one around it"):
            checks.check_watched("import_draft.checkpoints.one.model", str(draft), "import_draft.watch", watch)


# --- keys of earlier versions ---------------------------------------------------------------------------------------


def with_old_key(old: str, new: str) -> dict[str, Any]:
    """The committed file's sections with one key as an earlier version named it; `*` is the workload eval."""
    sections: dict[str, Any] = YAML(typ="safe").load(REAL)
    *above, key = new.replace("*", "eval").split(".")
    place = sections
    for part in above:
        place = place[part]
    place[old.rpartition(".")[2]] = place.pop(key)
    return sections


@pytest.mark.parametrize(("old", "new"), OLD_KEYS.items())
def test_an_old_key_is_named_with_its_new_name(old: str, new: str, tmp_path: Path) -> None:
    """In params.yaml and in a recipe; else the one is an unknown key, and the other a missing one."""
    sections = with_old_key(old, new)
    line = f"{old} is now {new}; rename the key".replace("*", "eval")
    for name, read in (("params.yaml", schema.load_params), ("recipe.yaml", schema.read_recipe)):
        with (tmp_path / name).open("w") as file:
            YAML(typ="safe").dump(sections, file)
        with pytest.raises(ValueError, match="of an earlier version") as error:
            read(tmp_path / name)
        assert str(error.value) == f"{tmp_path / name} has 1 key(s) of an earlier version:\n  {line}"


def test_every_new_key_exists_and_no_old_one() -> None:
    known = {".".join(place).replace(".eval.", ".*.") for place in LEAVES} | {"benchmark_methods.with_draft"}
    known |= {"benchmark_methods.without_draft"}
    assert set(OLD_KEYS.values()) <= known and not set(OLD_KEYS) & known


def test_drafts_of_one_chain_have_the_same_shapes() -> None:
    block = {"epochs": 1, "method": "dflash", "layers": 2, "block_size": 5, "anchors": 8}
    segments = {
        "e001": {"from": "e000", "epochs": 1}, "e002": {"from": "e001", "epochs": 1}, "b001": {"from": "e000", **block},
        "b002": {"from": "b001", **block}, "b003": {"from": "b002", **block}, "w001": {"from": "e000", **block, "block_size": 9},
    }  # fmt: skip
    theirs = {"model": "someone/theirs", "revision": None, "rope_theta": None}
    whole = copy.deepcopy(READ)
    whole["train_draft"]["checkpoints"] |= segments
    whole["import_draft"]["checkpoints"] = {"theirs": theirs, "others": theirs}
    Path("params.yaml").write_text(json.dumps(whole))
    p = schema.load_params()
    groups = [{"e000", "e001", "e002"}, {"b001", "b002", "b003"}, {"w001"}, {"theirs"}, {"others"}]
    for group in groups:
        for one in group:
            assert {other for some in groups for other in some if p.have_same_shapes(one, other)} == group
