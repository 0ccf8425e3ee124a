"""docs/flags.md: each flag of the seeds does something, shown by an effect in a small run, here or in the test that PROVEN names.

The runs are of tests/flag_runs.py: a tiny target of random weights, a draft trained on 17 rows for one epoch.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stages import extract_hiddens, sample_target, train_draft
from stages.draft import checkpoint
from stages.params import schema
from stages.params.tree_shape import TreeShape
from stages.serving import engine_flags
from tests import flag_runs
from tests.conftest import ROOT, edit_params
from tests.talking import read_questions
from tests.test_flags import DOCUMENTED

# Flag -> the test that shows its effect: of this file, or FILE::TEST.
PROVEN = {
    "DATA_NAME_OR_PATH": "test_data_path_and_format",
    "DATA_FORMAT": "test_data_path_and_format",
    "TRAIN_DATA_PATH": "test_data_path_and_format",
    "fix_toon_data.py": "tests/data/tables/test_toon_any_schema.py::test_without_a_schema",
    "EVAL_DATA_PATH": "test_an_eval_file_is_the_eval_split",
    "DATA_SHARD_SIZE": "test_shards_hold_so_many_rows",
    "generate_data_for_target_model.sh": "tests/sampling/test_interrupted_runs.py::test_two_servers_one_of_which_falls",
    "run_vllm_server.sh": "tests/serving/test_replicas.py::test_each_group_of_gpus_has_a_server",
    "BASE_PORT": "tests/params/test_values.py::test_a_range_of_ports_is_servers_of_sample_target_and_of_no_cell",
    "OUTPUT_DIR": "test_settings_of_training_change_the_draft",
    "TARGET_MODEL_NAME_OR_PATH": "tests/test_prepare_target.py::test_other_weights_in_a_local_folder_are_another_manifest",
    "DRAFT_MODEL_CONFIG_PATH": "tests/test_import_draft.py::test_a_config_of_ones_own_and_the_options",
    "TRAIN_HIDDEN_PATH": "tests/test_extract_hiddens.py::test_our_own_folder_is_imported_to_the_bit",
    "EVAL_HIDDEN_PATH": "tests/test_extract_hiddens.py::test_our_own_folder_is_imported_to_the_bit",
    "MODEL_MAX_LENGTH": "test_longer_rows_are_dropped_or_cut",
    "CHAT_TEMPLATE_TYPE": "tests/test_prepare_target.py::test_the_given_template_takes_the_place_of_the_targets_own",
    "LM_HEAD_KEY": "tests/target/test_manifest.py::test_a_head_may_be_named_and_a_copy_under_a_longer_name_is_not_taken",
    "RUN_NAME": "tests/training/test_trackers.py::test_wandb_keeps_a_run_offline_without_code_or_console",
    "train_eagle3_online.sh": "tests/test_train_draft.py::test_online_learns_what_stored_hidden_states_teach",
    "train_eagle3_offline.sh": "test_settings_of_training_change_the_draft",
    "train_eagle3_vlm_online.sh": "tests/test_pictured_stages.py::test_a_draft_is_trained_replayed_and_decoded",
    "train_eagle3_vlm_offline.sh": "tests/test_pictured_stages.py::test_a_draft_is_trained_replayed_and_decoded",
    "run_weather.sh": "tests/test_recipes.py::test_recipes_never_mix",
    "epoch_3": "test_settings_of_training_change_the_draft",
    "tools/spec_benchmark.py": "test_answers_follow_the_workloads_keys",
    "--base-model-path": "tests/test_prepare_target.py::test_other_weights_in_a_local_folder_are_another_manifest",
    "--eagle-model-path": "tests/test_import_draft.py::test_an_imported_draft_is_measured_like_the_checkpoint_it_was",
    "--model-id": "tests/reporting/test_angelslim_export.py::test_a_cell_gives_a_file_for_each_way_and_an_analysis",
    "--output-dir": "tests/reporting/test_angelslim_export.py::test_a_cell_gives_a_file_for_each_way_and_an_analysis",
    "--no-metrics": "tests/reporting/test_angelslim_export.py::test_a_cell_gives_a_file_for_each_way_and_an_analysis",
    "--mode": "tests/test_benchmark_loads.py::test_a_mode_of_one_kind_has_the_counts_of_both",
    "--bench-name": "test_prompts_follow_the_workloads_keys",
    "--question-begin": "test_prompts_follow_the_workloads_keys",
    "--question-end": "test_prompts_follow_the_workloads_keys",
    "--temperature": "test_answers_follow_the_workloads_keys",
    "--seed": "test_answers_follow_the_workloads_keys",
    "--max-new-token": "test_answers_follow_the_workloads_keys",
    "--total-token": "test_answers_follow_the_workloads_keys",
    "--depth": "test_answers_follow_the_workloads_keys",
    "--top-k": "test_answers_follow_the_workloads_keys",
    "--num-gpus-per-model": "tests/test_benchmark_loads.py::test_fewer_gpus_than_asked_for_are_told",
    "--num-gpus-total": "tests/test_benchmark_loads.py::test_two_processes_make_the_cell_of_one",
    "--max-gpu-memory": "tests/engine/test_device_placement.py::test_weights_above_the_limit_are_told_with_the_numbers",
    "test_sclang_withbenchmark.py": "tests/measuring/test_benchmark_served.py::test_served_cycles_equal_those_of_replay",
    "speculative-num-steps": "test_a_tree_is_the_engines_flags",
    "speculative-eagle-topk": "test_a_tree_is_the_engines_flags",
    "speculative-num-draft-tokens": "test_a_tree_is_the_engines_flags",
}


def test_every_documented_flag_is_proven_by_a_test_that_exists() -> None:
    assert set(PROVEN) == set(DOCUMENTED)
    for flag, test_id in PROVEN.items():
        file, _, name = test_id.rpartition("::")
        text = (ROOT / (file or "tests/test_flag_effects.py")).read_text(encoding="utf-8")
        assert re.search(rf"^(async )?def {name}\(", text, re.MULTILINE), f"{flag}: there is no {test_id}"


# Data


@pytest.fixture
def trained(trained_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    project = flag_runs.copy_trained(trained_once, tmp_path / "project")
    monkeypatch.chdir(project)
    return project


@pytest.fixture(scope="module")
def trained_once(shared_talking_project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = tmp_path_factory.mktemp("flags") / "project"
    shutil.copytree(shared_talking_project, project, symlinks=True)
    flag_runs.make_trained(project)
    return project


def test_data_path_and_format(trained: Path) -> None:
    before = sum(map(len, flag_runs.fix(raw="raw")))
    flag_runs.write_rows(Path("raw/more.jsonl"), 10, first=20)  # four of them are there already
    assert sum(map(len, flag_runs.fix(raw="raw"))) == before + 6
    one = flag_runs.fix(raw="raw/more.jsonl")
    assert sum(map(len, one)) == 10
    turns = [{"from": "human", "value": read_questions()[1]}, {"from": "gpt", "value": read_questions()[2]}]
    rows = [{"conversations": [turns[0] | {"value": f"{n} {read_questions()[1]}"}, turns[1]]} for n in range(12)]
    Path("raw/shared.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert sum(map(len, flag_runs.fix(raw="raw/shared.jsonl", format="sharegpt"))) == 12
    with pytest.raises(ValueError, match="sharegpt"):
        flag_runs.fix(raw="raw/more.jsonl", format="sharegpt")


def test_an_eval_file_is_the_eval_split(trained: Path) -> None:
    flag_runs.write_rows(Path("raw/held.jsonl"), 6, first=25)
    train, evaluation = flag_runs.fix(raw="raw", eval_file="held.jsonl")
    assert len(evaluation) == 6 and len(train) == 24


def test_shards_hold_so_many_rows(trained: Path) -> None:
    rows = len(pl.read_parquet("data/sampled/train/*.parquet"))
    assert len(list(Path("data/sampled/train").glob("*.parquet"))) == -(-rows // 4)
    edit_params(trained, {"sample_target": {"shard_size": 100}})
    sample_target.main()
    assert len(list(Path("data/sampled/train").glob("*.parquet"))) == 1
    assert len(pl.read_parquet("data/sampled/train/*.parquet")) == rows


def test_longer_rows_are_dropped_or_cut(trained: Path) -> None:
    lengths = pl.read_parquet("data/sampled/train/*.parquet").select(
        pl.col("prompt_ids").list.len() + pl.col("answer_ids").list.len()
    )
    limit = int(lengths.to_series().median() or 0)
    longer = int((lengths.to_series() > limit).sum())
    reports = {}
    for kind in ("drop", "truncate"):
        edit_params(trained, {"extract_hiddens": {"max_length": limit, "longer_rows": kind}})
        extract_hiddens.main()
        reports[kind] = json.loads(Path("results/hiddens_report.json").read_text())
    assert longer and reports["truncate"]["rows_out"] > reports["drop"]["rows_out"]


# Training


@pytest.mark.parametrize(
    "change",
    [
        {"learning_rate": 0.05},
        {"warmup_steps": 50},
        {"grad_clip": 1e-4},
        {"ttt_steps": 1},
        {"ttt_decay": 0.1},
        {"mask": "eagle"},
        {"loss": "lk_alpha"},
        {"schedule": "cosine", "horizon_epochs": 3},
        {"schedule": "linear", "horizon_epochs": 3},
        {"seed": 7},
    ],
    ids=lambda change: next(iter(change)),
)
def test_settings_of_training_change_the_draft(trained: Path, change: dict[str, Any]) -> None:
    """Of SpecForge's and AngelSlim's flags: another draft after one epoch; without a change the same one."""
    path = checkpoint.locate_checkpoint("e001") / "draft/model.safetensors"
    before = path.read_bytes()
    edit_params(trained, {"train_draft": change})
    train_draft.main("e001")
    assert path.read_bytes() != before


# The benchmark


def test_prompts_follow_the_workloads_keys(trained: Path) -> None:
    whole = flag_runs.prompts({"num_prompts": 6})["id"].to_list()
    assert flag_runs.prompts({"num_prompts": 2})["id"].to_list() == whole[:2]
    assert flag_runs.prompts({"num_prompts": None, "start": 2, "stop": 5})["id"].to_list() == whole[2:5]
    gsm8k = flag_runs.prompts({"prompts": "gsm8k", "num_prompts": 3})
    assert not set(gsm8k["id"]) & set(whole) and len(gsm8k) == 3
    drawn = flag_runs.prompts({"prompts": "random", "num_prompts": 4, "input_tokens": 9, "length_range": 1.0})
    assert drawn["prompt_ids"].list.len().to_list() == [9] * 4
    ranged = flag_runs.prompts({"prompts": "random", "num_prompts": 8, "input_tokens": 9, "length_range": 0.0})
    assert len(set(ranged["prompt_ids"].list.len())) > 1


def test_answers_follow_the_workloads_keys(trained: Path) -> None:
    base = {"num_prompts": 2, "max_new_tokens": 6, "repeats": 1, "warmup": 0}
    greedy = flag_runs.decode(base)
    assert {row.output_tokens for row in greedy.point.requests} == {6} and greedy.row.temperature == 0
    assert {row.output_tokens for row in flag_runs.decode(base | {"max_new_tokens": 9}).point.requests} == {9}
    assert flag_runs.decode(base | {"repeats": 2}).row.requests == 2 * greedy.row.requests
    larger = flag_runs.decode(base, cell=("e003", "t3_1_4"))
    assert (larger.row.num_steps, larger.row.topk, larger.row.num_draft_tokens) == (3, 1, 4)
    assert (greedy.row.num_steps, greedy.row.topk, greedy.row.num_draft_tokens) == (3, 2, 6)
    drawn = [flag_runs.decode(base | {"temperature": 1.0, "seed": seed}) for seed in (1, 1, 2)]
    cycles = [[(row.cycles, row.accepted, row.finish_reason) for row in line.point.requests] for line in drawn]
    assert cycles[0] == cycles[1] and {line.row.temperature for line in drawn} == {1.0}
    assert drawn[0].row.tau == drawn[1].row.tau


def test_a_tree_is_the_engines_flags() -> None:
    tree = TreeShape.parse("t8_2_16")
    draft = engine_flags.ServedDraft("draft", "EAGLE3", tree.num_steps, tree.topk, tree.num_draft_tokens)
    line = engine_flags.build_speculation_flags("sglang", draft, {})
    for flag, value in (("num-steps", "8"), ("eagle-topk", "2"), ("num-draft-tokens", "16")):
        assert line[line.index(f"--speculative-{flag}") + 1] == value
    setup = engine_flags.ServerSetup(
        engine="sglang", folder="target", dtype="float16", device="cuda", trust_remote_code=False, tp=2, mem_fraction=0.85,
        max_total_tokens=65536, max_batch=None, context_length=None, torch_compile=True, more=("--context-length", "8192"),
    )  # fmt: skip
    command = engine_flags.build_setup_command(setup, 30000, [])
    for flag, value in (
        ("--tp-size", "2"), ("--mem-fraction-static", "0.85"), ("--max-total-tokens", "65536"), ("--dtype", "float16"),
        ("--context-length", "8192"), ("--port", "30000"),
    ):  # fmt: skip
        assert command[command.index(flag) + 1] == value, flag
    assert "--enable-torch-compile" in command and schema.Params.model_fields["benchmark_served"]
