"""Values and combinations of params.yaml that are refused: one line a problem, which begins with the key that is wrong."""

from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.params.params_edits import MEASURED, REAL, SECOND, edit_params_text, list_problems, set_value

PUBLISHED = "{model: AngelSlim/Qwen3-8B_eagle3, revision: null, rope_theta: null}"
TREES = "benchmark|trees: [t8_1_9, t5_1_6, t5_2_8, t8_2_16, t8_3_16, t5_4_16, t10_2_32, t10_3_32]"
MORE = "more: {from: flash, epochs: 2, method: dflash, layers: 3, block_size: 8, anchors: 64}"
FLASH = "flash: {from: e000, epochs: 2, method: dflash, layers: 2, block_size: 8, anchors: 64}"
HEADS = "heads: {from: e000, epochs: 2, method: medusa, heads: 4}"
TEXT_EDITS = [  # of the text of params.yaml: old, new, how the problem begins
    # checkpoints
    (SECOND, "e-9: {from: e003, epochs: 6}", "train_draft.checkpoints.e-9: expected a name"),
    (SECOND, "e009: {from: e010, epochs: 6}", "train_draft.checkpoints.e009.from: no checkpoint 'e010'"),
    (SECOND, "e000: {from: e003, epochs: 6}", "train_draft: checkpoints.e000 is made by init_draft"),
    ("e003: {from: e000,", "e003: {from: e009,", "train_draft: checkpoints e003 -> e009 -> e003 form a cycle"),
    ("    e003: {from", "    e004: {from", "replay_trees.checkpoints: no checkpoint 'e003'"),
    ("train_rows: 220", "train_rows: 0", "sample_target.train_rows is 0 and init_draft.checkpoints [e000]"),
    (MEASURED, "[e003, e003]", "benchmark.checkpoints: e003 is listed twice"),
    ("[e003, e009]", "[zzz]", "replay_trees.checkpoints: no checkpoint 'zzz'"),
    # segments of other families
    (SECOND, f"{SECOND}\n    {HEADS.replace('e000', 'e003')}", "train_draft: checkpoints.heads is of medusa"),
    (SECOND, f"{SECOND}\n    {FLASH}\n    {MORE}", "train_draft: checkpoints.more.layers is 3, expected 2 as flash"),
    # trees and grids
    ("t8_2_16,", "8_2_16,", "benchmark.trees.3: expected text, found 8216; YAML reads 8_2_16 as the number 8216"),
    ("t8_2_16,", "t8_2_32,", "benchmark.trees: t8_2_32 "),
    # Bug: this one and digits of other scripts were read as t8_2_16: a cell then bore another name than its tree.
    ("t8_2_16,", "t08_2_16,", "benchmark.trees: 't08_2_16' is not the name of a tree; write t8_2_16"),
    ("t8_2_16,", "t8_2_16, t8_2_16,", "benchmark.trees: t8_2_16 is listed twice"),
    (TREES, "trees: [t5_2_8, s4]", "benchmark.trees: 's4' is no shape"),
    ("trace_trees: null", "trace_trees: [t3_2_16]", "replay_trees.trace_trees: t3_2_16 has 15 nodes under the root"),
    ("min_tau: null", "min_tau: 8.5", "check_overfit.min_tau 8.5 can't be reached"),
    # values
    ("device: cpu", "device: gpu", r"target.device: expected text matching ^(cpu|cuda(:\d+)?)$, found 'gpu'"),
    ("chat_template: null", "chat_template: templates/own.jinja", "target.chat_template: expected the file's name without"),
    ("feature_layers: null", "feature_layers: [4, 2, 3]", "target.feature_layers: is [4, 2, 3], expected ids in increasing"),
    ("tables: data/tables/weather.yaml", "tables: ../weather.yaml", "fix_data.tables: is ../weather.yaml, expected a YAML file"),
    ("num_gpus_per_model: 1 ", "num_gpus_per_model: 2 ", "benchmark: num_gpus_total is 1, expected a multiple of"),
    # Bug: .inf was greater than 0 and so accepted.
    *((f"{key}: {value}", f"{key}: {number}", "") for number in (".nan", ".inf", "-.inf")
      for key, value in (("learning_rate", "0.03"), ("grad_clip", "0.5"), ("temperature", "0.7"), ("memory_gib", "0.25"))),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "start"), TEXT_EDITS, ids=[row[1][-40:] for row in TEXT_EDITS])
def test_an_edit_that_is_refused(old: str, new: str, start: str) -> None:
    edit_params_text((old, new))
    line, *_ = list_problems()
    assert line.startswith(start) and (start or "expected a finite number, found " in line), line


UNTIL = ("benchmark", "workloads", "eval", "until")
SAMPLED_BY, SERVED_BY = (
    ("sample_target", "server", "base_urls"),
    ("benchmark_served", "servers", "sglang", "base_urls"),
)
EVAL = YAML(typ="safe").load(REAL)["benchmark"]["workloads"]["eval"]
RANDOM = {"prompts": "random", "input_tokens": 512, "concurrency": 64, "length_range": 0.5}
SWEEP = {"max_new_tokens": [10, 128], "concurrency": 4, "num_prompts": [3, 20], "request_rate": "inf"}
FILE = {"from": "data/prompt_sets/a.jsonl", "name": None, "split": None, "revision": None, "format": "gsm8k"}
VALUES: list[tuple[tuple[str, ...], Any, str]] = [  # key path, value, how the problem goes on behind the key path
    (("target", "model"), ..., ": missing, and it has no default"),
    (("fix_data", "raw"), ..., ": missing, and it has no default"),
    (("train_draft", "checkpoints", "epochs"), 3, ": expected a section"),  # bug: it ended in a traceback
    # Bug: a local target `--load-format=...` was a word of the engine's command line, and a flag there.
    (("target", "model"), "--load-format=dummy", ": expected an id or a path, which does not begin with -"),
    (("init_draft", "from"), "--load-format=dummy", ": expected an id or a path, which does not begin with -"),
    (UNTIL, {"half_width": 0}, ".half_width: expected greater than 0"),
    (("sample_target", "temperature"), [], ": expected at least 1 item, found []"),
    (("sample_target", "temperature"), [{"temperature": 1.0}], ".0.weight: missing"),
    # Bug: the stage found them, when the target was loaded or another cell measured.
    (SAMPLED_BY, ["http://gpu1:6007-6000"], ": http://gpu1:6007-6000 is no range of ports"),
    (SERVED_BY, {"baseline": "http://gpu2:6000-6007"}, ".baseline: expected text matching"),
    *((("benchmark", "workloads", "chat"), EVAL | changes, end) for changes, end in (
        ({"prompts": "mtbench"}, ".prompts is 'mtbench' (did you mean mt_bench?), expected"),
        ({"prompts": "alpaca", "grade": True}, ".grade is true, expected prompts with references"),
        (RANDOM | {"input_tokens": None}, ": input_tokens is None with prompts: random"),
        ({"start": 4, "stop": 4}, ": stop is 4, expected more than start, 4"),
        ({"request_rate": "slow"}, ".request_rate: expected 'inf', found 'slow'"),
        (SWEEP, ": num_prompts is [3, 20] with concurrency 4, expected a number for"),
    )),
    *((("prepare_prompts", "sets", "math"), FILE | changes, end) for changes, end in (
        ({"split": "test"}, ": from is data/prompt_sets/a.jsonl, expected split to be null"),
        ({"columns": {"prompt": "Frage"}}, ": format is gsm8k, expected null while columns names the columns"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("key_path", "value", "end"), VALUES, ids=[row[2][:40] for row in VALUES])
def test_a_value_that_is_refused(key_path: tuple[str, ...], value: Any, end: str) -> None:
    set_value(key_path, value)
    assert any(line.startswith(".".join(key_path) + end) for line in list_problems()), list_problems()
