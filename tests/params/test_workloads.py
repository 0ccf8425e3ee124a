"""Workloads and prompt sets: loads, sweeps and GPUs that can be asked for, and those that are refused."""

from typing import Any

from ruamel.yaml import YAML

from stages.params import schema
from tests.params.params_edits import REAL, edit_params_text, list_problems, set_value


def workload(**changes: Any) -> dict[str, Any]:
    return {**YAML(typ="safe").load(REAL)["benchmark"]["workloads"]["eval"], **changes}


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
