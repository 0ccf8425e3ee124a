"""The timing grid of the torch engine on a tiny target: every tree in every round, and what can't be timed is refused."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stages import time_cycles
from stages.cells import cost_fit, timing_grid
from stages.engine.decode import Engine
from stages.engine.decode_state import DecodeRequest, RequestUpdate
from stages.engines import torch_cycles
from stages.params import schema
from stages.prompts import workload_prompts
from tests.conftest import edit_params

pytestmark = pytest.mark.usefixtures("one_thread")
GRID = {
    "num_steps": [1, 3, 6], "topk": [1, 2], "num_draft_tokens": [2, 4, 8], "context": 16, "warmup": 1, "cycles": 2,
    "repeats": 3, "batches": [1],
}  # fmt: skip
PROMPTS = [[5 + (7 * n) % 40 for n in range(start, start + 12)] for start in (0, 12)]


def write_contexts() -> None:
    """Write the prompts that contexts are made of."""
    prompts = [workload_prompts.WorkloadPrompt(str(n), ids) for n, ids in enumerate(PROMPTS)]
    workload_prompts.write_prompts("eval", prompts, [])


@pytest.fixture
def project(talking_project: Path) -> Path:
    """With a draft called e000: its shapes are those of every checkpoint."""
    shutil.copytree(Path("drafts").resolve(), "copied")
    Path("drafts").unlink()
    Path("copied").rename("drafts")
    Path("drafts/e003").rename("drafts/e000")
    edit_params(talking_project, {"time_cycles": GRID})
    write_contexts()
    return talking_project


def test_every_tree_of_the_grid_has_a_cost(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_cycles, "_is_precise", lambda *_: False)
    time_cycles.main("torch", "e000")
    found = timing_grid.read_grids("torch", "e000", "tiny")[0]
    trees = schema.load_params().time_cycles.list_trees()
    assert [(r["num_steps"], r["topk"], r["num_draft_tokens"]) for r in found["grid"]] == [
        (t.num_steps, t.topk, t.num_draft_tokens) for t in trees
    ]
    assert all(r["batch"] == 1 and r["cycle_s"] > 0 and r["error"] >= 0 and r["samples"] == 6 for r in found["grid"])
    assert [p["samples"] for p in found["plain"]] == [6 * 7] and found["plain"][0]["step_s"] > 0
    assert found.fit == cost_fit.fit_cost_model(found.grid)
    assert found.process_share and found.process_share > 0 and found.spread is not None and found.spread >= 0
    assert found["draft"] == json.loads(Path("drafts/e000/draft/config.json").read_text())
    assert found["settings"] == GRID | {"dtype": "float32", "tree_scoring": "sglang"}
    assert (found["target"][0], found["hardware"]["threads"]) == ("tiny", 1)
    assert capsys.readouterr().out.startswith("torch: 10 cycles timed in ")


def test_several_sequences_are_timed_at_once(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each timed pass all of them advance, and a batch has costs of its own."""
    edit_params(project, {"time_cycles": {"batches": [1, 3]}})
    started, passes, real = list[Any](), list[set[int]](), Engine.decode_batch

    def note(engine: Engine, requests: list[DecodeRequest], slots: int, tree: Any) -> Iterator[list[RequestUpdate]]:
        started.append(tree)
        for update in real(engine, requests, slots, tree):
            passes.append({number for number, step in update if step and step.tokens})
            yield update

    monkeypatch.setattr(Engine, "decode_batch", note)
    time_cycles.main("torch", "e000")
    found = timing_grid.read_grids("torch", "e000", "tiny")[0]
    trees = schema.load_params().time_cycles.list_trees()
    assert [(row.shape, row.batch) for row in found.grid] == [(tree, batch) for batch in (1, 3) for tree in trees]
    assert [plain.batch for plain in found.plain] == [1, 3] and len(started) == 2 * 3 * (len(trees) + 1)
    contexts = torch_cycles.build_prompts(schema.load_params().time_cycles, image_token=PROMPTS[0][1])
    whole = [token for ids in PROMPTS for token in ids if token != PROMPTS[0][1]]
    assert [token for ids in contexts for token in ids] == [*whole, *whole, *whole][
        : 3 * 16
    ]  # after the last the first
    assert passes.count({0, 1, 2}) == 3 * 3 * (len(trees) + 7)  # rounds of 1 + 2 passes, plain ones 7 times as many


def test_no_end_token_stops_the_clock(project: Path) -> None:
    """Where every token is an end token, all cycles are timed all the same."""
    path = Path("artifacts/target/target.json")
    made = json.loads(path.read_text())
    Path("artifacts").unlink()
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(made | {"eos_token_ids": list(range(made["vocab_size"]))}))
    time_cycles.main("torch", "e000")
    assert all(row["samples"] == 6 for row in timing_grid.read_grids("torch", "e000", "tiny")[0]["grid"])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"cycles": 100000},
            r"time_cycles needs \d+ positions .*, the target holds \d+; lower time_cycles.context or cycles",
        )
    ],
)
def test_what_can_not_be_timed_is_refused(project: Path, keys: dict[str, int], message: str) -> None:
    edit_params(project, {"time_cycles": keys})
    with pytest.raises(ValueError, match=message):
        time_cycles.main("torch", "e000")
