"""The replay stage on answers at temperature 0 and above it, against cells that decode the same; and what it refuses.

A random target of nine tokens, and a random draft for it: so a third of the guesses is right.
"""

import shutil
from contextlib import chdir
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
import torch

from stages import benchmark, extract_hiddens, import_draft, init_draft, prepare_prompts, replay_trees
from stages.cells import replay_records
from stages.cells.replay_records import GroupTau, ReplayedTree, TreeBucket
from stages.cells.table import TableLine, find_replayed_tau
from stages.data import conversations
from stages.draft import checkpoint, supported_targets
from stages.engine.decode import Engine
from stages.engines import torch_engine
from stages.families.eagle3 import checkpoint as eagle3_checkpoint
from stages.hidden_states import shard_plan
from stages.params import schema
from stages.target import manifest
from tests.built_engines import build_engine
from tests.conftest import EVAL, ROOT, edit_params
from tests.draft.slow_draft import scatter, small_target
from tests.sampled_rows import sampled_row, write_sampled
from tests.torch_cells import read_line

V, END, ANSWER, PROMPTS = 9, 8, 30, 20
DRAWN = {**EVAL, "num_prompts": PROMPTS, "warmup": 0, "max_new_tokens": ANSWER, "temperature": 0.7, "top_p": 0.9}
SETTINGS: dict[str, Any] = {
    "target": {"model": "tiny", "num_threads": 1, "feature_layers": [1, 2, 3]},
    "sample_target": {"temperature": 0.7, "top_p": 0.9},
    "extract_hiddens": {"max_length": 256},
    "init_draft": {"draft_vocab_size": 6},
    "replay_trees": {"checkpoints": ["e003"], "num_steps": [1, 3], "topk": [1, 2], "num_draft_tokens": [4, 6],
        "trace_trees": ["t3_2_6"]},
    "benchmark": {
        "workloads": {"eval": {**DRAWN, "temperature": 0.0}, "drawn": DRAWN}, "torch_workloads": ["eval", "drawn"],
        "checkpoints": ["e003"], "trees": ["t3_1_4", "t3_2_6"],
    },
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def shared_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project up to its hidden states. The answers above temperature 0 are what the workload `drawn` draws."""
    project = tmp_path_factory.mktemp("replay")
    (project / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    edit_params(project, SETTINGS)
    with chdir(project):
        make_target(1, max_position_embeddings=256)
        p, target = schema.load_params(), manifest.read_manifest()
        draft, layers = init_draft._build_fresh_draft(p, target, torch.arange(V))
        config = init_draft.build_config_json(draft.config, layers, target)
        scatter(draft, 0.3, 2)
        eagle3_checkpoint.ROOT_FILES.write(checkpoint.locate_checkpoint("e003"), config, dict(draft.state_dict()))
        engine = build_engine(
            small_target(V, 1, max_position_embeddings=256), target.eos_token_ids, target.feature_layers
        )
        prompts = torch.randint(0, END, (PROMPTS, 5), generator=torch.Generator().manual_seed(4)).tolist()
        prompts[::4] = torch.randint(0, END, (PROMPTS // 4, 118), generator=torch.Generator().manual_seed(8)).tolist()
        for split, workload in (("train", "eval"), ("eval", "eval"), ("eval_t", "drawn")):
            work: Any = SimpleNamespace(workload=p.benchmark.workloads[workload], samples_drafts=False)
            rows = [answer_prompt(engine, work, f"row{n}.0", prompt) for n, prompt in enumerate(prompts)]
            write_sampled(split, rows)
        fixed = [{"id": f"row{n}", "source": f"{n % 2}.jsonl", "verdict": "clean"} for n in range(PROMPTS)]
        table = pl.DataFrame(fixed, schema=conversations.FIXED_SCHEMA)
        conversations.write_table(Path("data/fixed/eval.parquet"), table, conversations.FIXED_SCHEMA)
        extract_hiddens.main()
        for workload in p.benchmark.torch_workloads:
            prepare_prompts.main(workload)
    return project


def make_target(seed: int, **options: Any) -> None:
    model = small_target(V, seed, eos_token_id=END, **options)
    model.save_pretrained("tiny")
    manifest.write_manifest(
        Path("artifacts/target"), supported_targets.describe_target("tiny", None, model.config, Path("tiny"), [1, 2, 3])
    )


def answer_prompt(engine: Engine, work: Any, name: str, prompt: list[int]) -> dict[str, Any]:
    sampling_params = torch_engine.make_sampling_params(work.workload, False, name, 0, 0)
    answer = [token for step in engine.decode_plain(prompt, ANSWER, sampling=sampling_params) for token in step.tokens]
    top_p, reason = work.workload.top_p if sampling_params else None, "stop" if answer[-1] == END else "length"
    changes = {"temperature": work.workload.temperature, "top_p": top_p, "finish_reason": reason}
    return sampled_row(name, 0, prompt, answer, **changes)


@pytest.fixture
def project(shared_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    project = tmp_path / "project"
    shutil.copytree(shared_project, project)
    monkeypatch.chdir(project)
    return project


def test_taus_by_source_and_context_add_up(project: Path) -> None:
    """The contexts' are those of the trees that are grown again and traced."""
    replay_trees.main("e003")
    found, traced = GroupTau.read("e003"), TreeBucket.read("e003")
    for tree in replay_records.select_temperature(ReplayedTree.read("e003"), 0):
        for by, groups in (("source", ["0.jsonl", "1.jsonl"]), ("context", ["0-128", "128-256"])):
            parts = [part for part in found if part.tree == tree.shape.name and part.by == by]
            assert [part.group for part in parts] == groups and parts[0].tau != parts[1].tau
            assert sum(part.cycles for part in parts) == tree.cycles
            assert parts[1].answers == (PROMPTS // 2 if by == "source" else 2)
            assert sum((part.tau - 1) * part.cycles for part in parts) == pytest.approx(tree.accepted)
        long = [
            b for b in traced if (b.tree, b.by) == (tree.shape.name, "context") and int(b.bucket.split("-")[0]) >= 128
        ]
        if tree.shape.name == "t3_2_6":
            accepted = sum(bucket.accepted for bucket in long)
            assert accepted == pytest.approx((parts[1].tau - 1) * parts[1].cycles)
            assert sum(bucket.cycles or 0 for bucket in long) == parts[1].cycles > 5


def measure_replayed(rows: list[ReplayedTree], workload: str, name: str, tree: str) -> TableLine:
    """Return the line of a cell whose integers are those of the replay."""
    benchmark.main(workload, name, tree)
    line = read_line(workload, name, tree)
    (row,) = (r for r in rows if (r.tree, r.temperature) == (tree, line.row.temperature))
    assert row.tau_low < row.tau < row.tau_high
    counts = [sum(answer[k] for answer in line.point.requests) for k in ("accepted", "cycles")]
    assert [row.accepted, row.cycles] == counts and row.accepted > 5, tree
    assert find_replayed_tau(rows, line.cell) == line.row.tau == row.tau
    return line


def test_a_cell_above_temperature_0_accepts_what_the_replay_of_its_answers_says_as_integers(project: Path) -> None:
    replay_trees.main("e003")
    rows = ReplayedTree.read("e003")
    assert [(row.temperature, row.top_p) for row in rows] == [(0.0, None)] * 4 + [(0.7, 0.9)] * 4
    for tree in ("t3_1_4", "t3_2_6"):
        assert measure_replayed(rows, "eval", "e003", tree).row.identical_share == 1.0
        drawn = measure_replayed(rows, "drawn", "e003", tree).row.identical_share
        assert drawn is None, "not defined where answers are drawn"


LOOKUPS = {  # shapes of benchmark.trees, and of the same numbers those at other num_steps, 1 and 3
    "lookup": (["n2_1_4", "n1_1_3"], ["n2_1_1", "n2_1_3", "n2_1_4", "n1_1_1", "n1_1_3"]),
    "suffixes": (["x8_4", "x4_2"], ["x8_1", "x8_3", "x8_4", "x4_1", "x4_2", "x4_3"]),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_lookup_accepts_in_cells_what_its_replay_says_as_integers(project: Path, name: str) -> None:
    """The suffixes' earlier answers are those of the cell's order."""
    named, replayed = LOOKUPS[name]
    builtin = {"lookup": {"model": "builtin/ngram"}, "suffixes": {"model": "builtin/suffix"}}
    only = {"import_draft": {"checkpoints": builtin}, "replay_trees": {"checkpoints": [name]}}
    edit_params(project, only | {"benchmark": {"checkpoints": [name], "trees": named}})
    import_draft.main(name)
    replay_trees.main(name)
    rows = ReplayedTree.read(name)
    assert [row.tree for row in rows] == replayed * 2 and [row.shape.name for row in rows] == replayed * 2
    edit_params(project, {"benchmark": {"trees": replayed}})
    parts = [part for part in GroupTau.read(name) if part.by == "context"]
    for row in rows:
        measure_replayed(rows, "drawn" if row.temperature else "eval", name, row.tree)
        assert row.tau_oracle is row.tau_adaptive is None and row.tau - 1 <= row.mean_depth <= row.num_steps
        assert row.temperature or sum(part.cycles for part in parts if part.tree == row.tree) == row.cycles
    assert TreeBucket.read(name) == []


# What is refused


def refused() -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - each caller looks at the message
        replay_trees.main("e003")
    assert not ReplayedTree.locate("e003").exists()
    return str(error.value)


def test_hidden_states_of_other_answers(project: Path) -> None:
    rows = conversations.read_table(
        Path("data/sampled/eval"), conversations.SAMPLED_SCHEMA, "sample_target"
    ).with_columns(pl.col("answer_ids").list.head(3))
    write_sampled("eval", rows.to_dicts())
    message = refused()
    assert message.startswith("data/hiddens/eval: ") and "run: dvc repro extract_hiddens" in message
    assert " is another answer than those in data/sampled/eval;" in message


def test_answers_that_extract_hiddens_cuts_are_replayed_as_if_sampled_so(project: Path) -> None:
    """Bug: with `longer_rows: truncate` a longer eval row was "another answer than those in data/sampled/eval"."""
    tables = {
        split: conversations.read_table(Path(split), conversations.SAMPLED_SCHEMA, "sample_target")
        for split in ("data/sampled/eval", "data/sampled/eval_t")
    }
    limit = max(shard_plan.list_lengths(tables["data/sampled/eval"])) - 10
    edit_params(project, {"extract_hiddens": {"max_length": limit, "longer_rows": "truncate"}})
    extract_hiddens.main()
    replay_trees.main("e003")
    found = ReplayedTree.locate("e003").read_bytes()
    for split, table in tables.items():
        cut = shard_plan.fit_rows(table, limit, truncate=True)
        assert len(cut) == len(table) and not cut.equals(table)
        conversations.write_table(Path(split) / conversations.name_shard(0), cut, conversations.SAMPLED_SCHEMA)
    edit_params(project, {"extract_hiddens": {"max_length": 512, "longer_rows": "drop"}})
    extract_hiddens.main()
    replay_trees.main("e003")
    assert found == ReplayedTree.locate("e003").read_bytes()


def test_answers_drawn_otherwise_than_is_asked(project: Path) -> None:
    edit_params(project, {"sample_target": {"top_p": 1.0}})
    assert refused() == (
        "data/sampled/eval_t has answers of temperature 0.7, top_p 0.9, expected temperature 0.7, top_p 1, as sample_target "
        "asks; run: dvc repro sample_target"
    )


def test_hidden_states_of_another_target(project: Path) -> None:
    """Bug: a target of the same shape, trained from another seed, passed for the one the hidden states are of."""
    make_target(7)
    message = refused()
    assert message.startswith("data/hiddens/eval holds hidden states of another target, tiny (")
    assert "expected those of tiny as it is in artifacts/target now" in message
    assert message.endswith("run: dvc repro -f -s extract_hiddens")
