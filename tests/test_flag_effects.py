"""docs/flags.md: what flags of the seeds do, shown by an effect in a small run.

The runs are of tests/flag_runs.py: a tiny target of random weights, a draft trained on 17 rows for one epoch.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stages import extract_hiddens, sample_target, train_draft
from stages.draft import checkpoint
from stages.params import schema
from stages.params.families import EAGLE3
from stages.params.tree_shape import TreeShape
from stages.serving import engine_flags
from tests import flag_runs
from tests.conftest import edit_params
from tests.talking import read_questions

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
    draft = engine_flags.ServedDraft("draft", "EAGLE3", tree.num_steps, tree.topk, tree.num_draft_tokens, EAGLE3)
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
