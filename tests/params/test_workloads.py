"""Workloads and prompt sets: loads, sweeps and GPUs that can be asked for, and those that are refused."""

from typing import Any

import pytest
from ruamel.yaml import YAML

from stages.params import schema
from tests.params.params_edits import REAL, edit_params_text, list_problems, set_value


def workload(**changes: Any) -> dict[str, Any]:
    return {**YAML(typ="safe").load(REAL)["benchmark"]["workloads"]["eval"], **changes}


RANDOM = {"prompts": "random", "input_tokens": 512, "concurrency": 64, "length_range": 0.5}
BAD_WORKLOADS = [
    ({"prompts": "mtbench"}, "benchmark.workloads.chat.prompts is 'mtbench' (did you mean mt_bench?), expected"),
    ({"prompts": "alpaca", "grade": True}, "benchmark.workloads.chat.grade is true with prompts: alpaca"),
    ({**RANDOM, "input_tokens": None}, "benchmark.workloads.chat: input_tokens is None with prompts: random"),
    ({**RANDOM, "num_prompts": None}, "benchmark.workloads.chat: num_prompts is null with prompts: random"),
    ({"start": 4, "stop": 4}, "benchmark.workloads.chat: stop is 4, expected more than start, 4"),
    ({"request_rate": "slow"}, "benchmark.workloads.chat.request_rate: expected 'inf', found 'slow'"),
    ({"concurrency": [1, 0]}, "benchmark.workloads.chat.concurrency.1: expected greater than 0, found 0"),
]


@pytest.mark.parametrize(("changes", "start"), BAD_WORKLOADS, ids=[row[1][24:60] for row in BAD_WORKLOADS])
def test_a_workload_that_can_not_be_asked(changes: dict[str, Any], start: str) -> None:
    set_value(("benchmark", "workloads", "chat"), workload(**changes))
    (line,) = list_problems()
    assert line.startswith(start), line


def test_gpus_are_shared_out_among_whole_copies_of_the_target() -> None:
    two = ("num_gpus_total: 1 ", "num_gpus_total: 6 "), ("num_gpus_per_model: 1 ", "num_gpus_per_model: 2 ")
    edit_params_text(*two, ("device: cpu ", "device: cuda "))
    assert schema.load_params().benchmark.processes == 3
    edit_params_text(*two)
    (line,) = list_problems()
    assert line.startswith("benchmark.num_gpus_per_model is 2 with target.device cpu, expected 1")
    edit_params_text(("num_gpus_total: 1 ", "num_gpus_total: 6 "), ("num_gpus_per_model: 1 ", "num_gpus_per_model: 4 "))
    (line,) = list_problems()
    assert line.startswith("benchmark: num_gpus_total is 6, expected a multiple of num_gpus_per_model, 4")


def test_prompts_may_be_a_number_for_each_concurrency() -> None:
    changes = {"max_new_tokens": [10, 128], "concurrency": [1, 4], "num_prompts": [3, 20], "request_rate": "inf"}
    set_value(("benchmark", "workloads", "sweep"), workload(**changes))
    sweep = schema.load_params().benchmark.workloads["sweep"]
    assert (sweep.limit_prompts(1), sweep.limit_prompts(4), sweep.most_prompts) == (3, 20, 20)
    set_value(("benchmark", "workloads", "sweep"), workload(**{**changes, "concurrency": 4}))
    (line,) = list_problems()
    assert line.startswith(
        "benchmark.workloads.sweep: num_prompts is [3, 20] with concurrency 4, expected a number for"
    )


FILE = {"from": "data/prompt_sets/a.jsonl", "name": None, "split": None, "revision": None, "format": "gsm8k"}
BAD_SETS = [
    ("math", {"split": "test"}, "from is data/prompt_sets/a.jsonl, expected split to be null"),
    ("math", {"revision": "main"}, "from is the path data/prompt_sets/a.jsonl, expected name and revision to be null"),
    ("math", {"from": "openai/gsm8k"}, "from is openai/gsm8k, which is no path here; expected split to say which part"),
    ("math", {"columns": {"prompt": "Frage"}}, "format is gsm8k, expected null while columns names the columns"),
    ("eval", {}, "sets.eval: eval, random, written are reserved"),
]


@pytest.mark.parametrize(("name", "changes", "says"), BAD_SETS, ids=[row[2][:40] for row in BAD_SETS])
def test_a_prompt_set_that_can_not_be_read(name: str, changes: dict[str, Any], says: str) -> None:
    set_value(("prepare_prompts", "sets", name), {**FILE, **changes})
    (line,) = list_problems()
    assert line.startswith("prepare_prompts") and says in line
