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


def test_it_comes_back_whole(grid_file: Path) -> None:
    assert grid_file == Path("results/cost/torch-e000.json")
    assert timing_grid.read_timing_grid("e000", MODEL) == costs.made_up()


def test_a_missing_one_says_what_to_run() -> None:
    with pytest.raises(ValueError, match=r"torch-theirs\.json not found; run: dvc repro time_trees@theirs"):
        timing_grid.read_timing_grid("theirs", MODEL)


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


def test_what_is_no_cost_is_refused(grid_file: Path) -> None:
    grid_file.write_text("[1]")
    with pytest.raises(ValueError, match=r"expected a JSON dict.*run: dvc repro -f -s time_trees@e000"):
        timing_grid.read_timing_grid("e000", MODEL)


def test_machines_differ_in_what_moves_a_clock() -> None:
    other = costs.HARDWARE | {"cpu": "Another CPU", "python": "3.13.0", "gpu": "NVIDIA H200"}
    assert timing_grid.list_hardware_differences(costs.HARDWARE, costs.HARDWARE | {"python": "3.13.0"}) == []
    assert timing_grid.list_hardware_differences(costs.HARDWARE, other) == [
        "cpu (Made-up CPU, 2 cores against Another CPU)", "gpu (None against NVIDIA H200)",
    ]  # fmt: skip
