"""Costs on disk: what is written comes back, and what is another's is refused with what to run."""

import json
from pathlib import Path
from typing import Any

import pytest

from stages.cells import timing_grid
from stages.runtime import atomic
from tests import costs

MODEL = "builtin/weather-tiny"


@pytest.fixture(autouse=True)
def grid_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return timing_grid.write_timing_grid(costs.made_up())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ({"grid": []}, "holds a wrong grid: List should have at least 1 item"),
        ({"plain": [{"batch": 1}]}, r"lacks \['plain.error', 'plain.samples', 'plain.step_s'\]"),
        ({"definitions": "docs/cost.md, version 0"}, "version 0, expected docs/cost.md, version 6"),
        ({"checkpoint": "theirs"}, "has timed the draft of checkpoint theirs, expected e000: its costs are another's"),
        ({"target": ["Qwen/Qwen3-8B", None, ""]}, "has timed drafts of the target Qwen/Qwen3-8B, expected builtin/weather-tiny"),
        ({"fit": None, "hardware": None}, r"lacks \['fit', 'hardware'\]"),
    ],
)  # fmt: skip
def test_what_is_cut_or_anothers_is_refused(grid_file: Path, spoil: dict[str, Any], message: str) -> None:
    found = json.loads(grid_file.read_text()) | spoil
    atomic.write_json(
        grid_file, {k: v for k, v in found.items() if v is not None or k in ("workload", "max_new_tokens")}
    )
    with pytest.raises(ValueError, match=f"{message}.*run: dvc repro -f -s time_trees@e000"):
        timing_grid.read_timing_grid("e000", MODEL)
