"""Small runs in which flags show their effect: data, a draft trained on a tiny target, cells of the torch engine."""

import json
import shutil
from contextlib import chdir
from pathlib import Path
from typing import Any

from stages import benchmark, extract_hiddens, fix_data, init_draft, prepare_prompts, sample_target, train_draft
from stages.cells.table import TableLine
from tests.conftest import edit_params
from tests.talking import WORKLOADS, read_questions
from tests.torch_cells import read_line

CELL = ("e003", "t3_2_6")
CHECKPOINTS = {  # e003 is talking_project's, of random weights
    "e001": {"from": "e000", "epochs": 1}, "e002": {"from": "e001", "epochs": 1}, "e003": {"from": "e000", "epochs": 3},
}  # fmt: skip
TRAINED = {
    "fix_data": {"raw": "raw", "answers": "text", "eval_share": 0.3, "max_dropped_share": None},
    "sample_target": {
        "backend": "keep", "train_rows": None, "eval_rows": None, "temperature": 0.0, "max_new_tokens": 4, "shard_size": 4,
    },
    "extract_hiddens": {"max_length": 400},
    "init_draft": {"draft_vocab_size": 64, "intermediate_size": 32},
    "train_draft": {"checkpoints": CHECKPOINTS, "ttt_steps": 2, "warmup_steps": 0},
    "check_overfit": {"min_tau": 1.0},
    "replay_trees": {"checkpoints": ["e001"]},
    "time_trees": {"checkpoints": ["e000"]},
}  # fmt: skip


def make_trained(project: Path) -> None:
    """Train e001 for one epoch on the tiny target of `project`, as talking_project has it."""
    write_rows(project / "raw/rows.jsonl", 24)
    edit_params(project, TRAINED)
    with chdir(project):
        for stage in (fix_data, sample_target, extract_hiddens, init_draft):
            stage.main()
        train_draft.main("e001")


def write_rows(path: Path, count: int, first: int = 0) -> None:
    path.parent.mkdir(exist_ok=True)
    texts = read_questions()
    rows = [{"prompt": f"{n}: {texts[n][:40]}", "answer": texts[n + 1][:60]} for n in range(first, first + count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def copy_trained(made: Path, to: Path) -> Path:
    shutil.copytree(made, to, symlinks=True)
    return to


def decode(workload: dict[str, Any], cell: tuple[str, str] = CELL, **settings: Any) -> TableLine:
    """Measure a cell of the workload `eval` with changed keys, and of `benchmark` with changed `settings`."""
    edit_params(Path(), {"benchmark": {"workloads": {**WORKLOADS, "eval": WORKLOADS["eval"] | workload}, **settings}})
    prepare_prompts.main("eval")
    benchmark.main("eval", *cell)
    return read_line("eval", *cell)
