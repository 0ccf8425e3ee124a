"""A project that is sampled in tests of sample_target: its settings, its answers, and runs of the stage that are killed."""

import itertools
import json
import multiprocessing
from pathlib import Path
from typing import Any

import polars as pl

from stages import sample_target
from stages.params import schema
from tests.conftest import edit_params

SERVER = {"launch": None, "launch_args": [], "start_timeout_s": 120.0, "base_urls": [], "model": None,
          "concurrency": 8, "timeout_s": 60.0, "attempts": 6, "api_key_env": None}  # fmt: skip
SPLITS = ("train", "eval", "eval_t")
# The builtin target's template, and tools, calls and thoughts as a template may render them.
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.name }}{% for k, v in c.function.arguments.items() %}"
    " {{ k }}={{ v | tojson }}{% endfor %}>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A stage that is killed runs in a fork of a process that has imported everything: half a second instead of five.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["stages.sample_target"])


def set_backend(project: Path, backend: str, server_: dict[str, Any] | None = None, **settings: Any) -> None:
    edit_params(project, {"sample_target": {"backend": backend, "server": SERVER | (server_ or {}), **settings}})


def answers(project: Path, split: str) -> pl.DataFrame:
    return pl.read_parquet(project / f"data/sampled/{split}/*.parquet")


def report(project: Path) -> dict[str, Any]:
    found = json.loads((project / "results/sample_report.json").read_text())
    assert found["rows_in"] == found["rows_out"] + sum(found["dropped"].values())
    return found


def start_stage() -> Any:
    """The stage as a process of its own, to be killed."""
    stage = FORKS.Process(target=sample_target.main)
    stage.start()
    return stage


def run_stage() -> None:
    stage = start_stage()
    stage.join(300)
    assert stage.exitcode == 0


def read_result(project: Path) -> tuple[dict[str, pl.DataFrame], dict[str, Any]]:
    """The rows of each split, checked for being one each, and what the report counts, but for how it came about."""
    rows = {split: answers(project, split) for split in SPLITS}
    for split, table in rows.items():
        assert table["id"].is_unique().all(), split
        size = schema.load_params().sample_target.shard_size
        heights = [pl.read_parquet(f).height for f in sorted((project / f"data/sampled/{split}").iterdir())]
        assert max(heights) <= size + 4  # the rest of a conversation of five turns
    assert not list(Path(".scratch").glob("sample_target-*"))
    return rows, {k: v for k, v in report(project).items() if k not in ("seconds", "asked_again", "server_restarts")}


def assert_same(found: tuple[dict[str, pl.DataFrame], dict[str, Any]], whole: Any) -> None:
    for split in SPLITS:
        assert found[0][split].equals(whole[0][split]), split
    assert found[1] == whole[1]


def conversations_of(project: Path, count: int, turns: int, **changes: Any) -> None:
    """Make the training data `count` conversations of `turns` questions each."""
    rows = pl.read_parquet("data/fixed/train.parquet").head(count).to_dicts()
    schema = pl.read_parquet("data/fixed/train.parquet").schema
    for n, row in enumerate(rows):
        says = itertools.cycle(("user", "assistant"))
        row["messages"] = [{"role": r, "content": f"{n}: {i}"} for i, r in zip(range(2 * turns), says, strict=False)]
        row |= changes
    pl.DataFrame(rows, schema=schema).write_parquet("data/fixed/train.parquet")


TOOLS = [{"type": "function", "function": {"name": "sky", "description": "d", "parameters": {"type": "object"}}}]
CALLED = {"id": "abc", "type": "function", "function": {"name": "sky", "arguments": '{"at": "Oslo", "b": [1, 2]}'}}


def with_tools(thoughts: bool) -> None:
    """Make every conversation one in which a tool is called: question, call, result, answer."""
    for split in ("train", "eval"):
        table = pl.read_parquet(f"data/fixed/{split}.parquet")
        rows = table.head(6).to_dicts()
        for row in rows:
            first = row["messages"][0]["content"]
            turns = [("user", first), ("assistant", ""), ("tool", "blue"), ("assistant", "it is blue")]
            row["messages"] = [{"role": role, "content": text} for role, text in turns]
            row["tools"], row["tool_calls"] = json.dumps(TOOLS), [None, json.dumps([CALLED]), None, None]
            row["reasoning"] = [None, "I look up", None, "so"] if thoughts else None
        pl.DataFrame(rows, schema=table.schema).write_parquet(f"data/fixed/{split}.parquet")
