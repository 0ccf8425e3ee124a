"""Settings of served cells in tests, whose servers are the double of SGLang and vLLM (tests/engines/engine_double.py)."""

import sys
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from stages.cells.replay_records import ReplayedTree
from tests.conftest import EVAL, edit_params

DOUBLE = [sys.executable, "-m", "tests.engines.engine_double"]
LOAD = {**EVAL, "num_prompts": 6, "warmup": 1, "max_new_tokens": 40}


def edit_server(project: Path, engine: str = "sglang", **changes: Any) -> None:
    """Change keys of benchmark_served.servers."""
    read = YAML(typ="safe").load((project / "params.yaml").read_text())["benchmark_served"].get("servers", {})
    edit_params(project, {"benchmark_served": {"servers": {**read, engine: {**read.get(engine, {}), **changes}}}})


def read_replayed_tree(tree: str) -> dict[str, Any]:
    steps, topk, tokens = map(int, tree[1:].split("_"))
    return next(
        t
        for t in ReplayedTree.read("e003")
        if (t["num_steps"], t["topk"], t["num_draft_tokens"]) == (steps, topk, tokens)
    )
