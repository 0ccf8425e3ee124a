"""The timing grid of the torch engine on a tiny target: every tree in every round, and what can't be timed is refused."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stages import time_trees
from stages.cells import cost_fit, timing_grid
from stages.engine.decode import Engine
from stages.engine.decode_state import DecodeRequest, RequestUpdate
from stages.params import schema
from tests.conftest import edit_params

pytestmark = pytest.mark.usefixtures("one_thread")
GRID = {
    "num_steps": [1, 3, 6], "topk": [1, 2], "num_draft_tokens": [2, 4, 8], "context": 16, "warmup": 1, "cycles": 2,
    "repeats": 3, "batches": [1],
}  # fmt: skip


@pytest.fixture
def project(talking_project: Path) -> Path:
    """With a draft called e000: its shapes are those of every checkpoint."""
    shutil.copytree(Path("drafts").resolve(), "copied")
    Path("drafts").unlink()
    Path("copied").rename("drafts")
    Path("drafts/e003").rename("drafts/e000")
    edit_params(talking_project, {"time_trees": GRID})
    return talking_project


def test_every_tree_of_the_grid_has_a_cost(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_trees, "_is_precise", lambda grid: False)
    time_trees.main("e000")
    found = timing_grid.read_timing_grid("e000", "tiny")
    trees = schema.load_params().time_trees.list_trees()
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
    assert capsys.readouterr().out.startswith("10 trees in ")


def test_several_sequences_are_timed_at_once(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each timed pass all of them advance, and a batch has costs of its own."""
    edit_params(project, {"time_trees": {"batches": [1, 3]}})
    started, passes, real = list[Any](), list[set[int]](), Engine.decode_batch

    def note(engine: Engine, requests: list[DecodeRequest], slots: int, tree: Any) -> Iterator[list[RequestUpdate]]:
        started.append(tree)
        for update in real(engine, requests, slots, tree):
            passes.append({number for number, step in update if step and step.tokens})
            yield update

    monkeypatch.setattr(Engine, "decode_batch", note)
    time_trees.main("e000")
    found = timing_grid.read_timing_grid("e000", "tiny")
    trees = schema.load_params().time_trees.list_trees()
    assert [(row.shape, row.batch) for row in found.grid] == [(tree, batch) for batch in (1, 3) for tree in trees]
    assert [plain.batch for plain in found.plain] == [1, 3] and len(started) == 2 * 3 * (len(trees) + 1)
    assert passes.count({0, 1, 2}) == 3 * 3 * (len(trees) + 7)  # rounds of 1 + 2 passes, plain ones 7 times as many
    whole = time_trees._build_prompts(24, 1, None)[0]  # all there is
    assert [one for prompt in time_trees._build_prompts(16, 3, None) for one in prompt] == [*whole, *whole]


def test_no_end_token_stops_the_clock(project: Path) -> None:
    """Where every token is an end token, all cycles are timed all the same."""
    path = Path("artifacts/target/target.json")
    made = json.loads(path.read_text())
    Path("artifacts").unlink()
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(made | {"eos_token_ids": list(range(made["vocab_size"]))}))
    time_trees.main("e000")
    assert all(row["samples"] == 6 for row in timing_grid.read_timing_grid("e000", "tiny")["grid"])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"context": 25}, r"answers of 24 tokens in all, expected 25 \(time_trees.context\); lower it"),
        (
            {"cycles": 100000},
            r"time_trees needs \d+ positions .*, the target holds \d+; lower time_trees.context or cycles",
        ),
    ],
)
def test_what_can_not_be_timed_is_refused(project: Path, keys: dict[str, int], message: str) -> None:
    edit_params(project, {"time_trees": keys})
    with pytest.raises(ValueError, match=message):
        time_trees.main("e000")
