"""The plans of benchmarks/big_graph.py for GPU machines, which no rehearsal with the tests' double goes through."""

import sys
from pathlib import Path

import pytest

from benchmarks import big_graph
from stages.params.schema import load_params

WORDS = {
    "graph": [],
    "long row": ["--long-row", "131072", "--window", "4096"],
    "costs": ["--costs", "--gpus", "0", "1", "2", "3"],
    "costs, other prompts": ["--costs", "--num-prompts", "20", "80", "256", "960", "--prefill-graphs"],
}


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_a_plan_makes_a_valid_params_file(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: --prefill-graphs was read and no option, so every plan but --small ended in an AttributeError."""
    monkeypatch.setattr(sys, "argv", ["big_graph", str(tmp_path), *words])
    options = big_graph.parse_words()
    big_graph.edit_params(tmp_path, options)
    flags = load_params(tmp_path / "params.yaml").benchmark_served.server.launch_args
    assert flags[flags.index("--cuda-graph-backend-prefill") + 1] == (
        "breakable" if "--prefill-graphs" in words else "disabled"
    )
