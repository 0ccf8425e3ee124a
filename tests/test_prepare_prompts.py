"""Workload prompts: the eval split's unchanged, a set's as transformers renders them, random ones as SGLang's."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from transformers import AutoTokenizer

from stages import prepare_prompts
from stages.prompts import prompt_sets, workload_prompts
from tests import talking
from tests.conftest import ROOT, edit_params
from tests.sampled_rows import write_sampled
from tests.talking import WORKLOADS

RANDOM = {
    "prompts": "random", "num_prompts": 40, "input_tokens": 64, "length_range": 0.5, "concurrency": 8, "warmup": 3,
}  # fmt: skip


@pytest.fixture
def project(talking_project: Path) -> Path:
    return talking_project


def ask(project: Path, name: str, **changes: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run the stage on a workload; return (rows to measure, rows of the warm-up)."""
    workload = {**WORKLOADS[name if name in WORKLOADS else "eval"], **changes}
    edit_params(project, {"benchmark": {"workloads": {**WORKLOADS, "chat": workload}}})
    prepare_prompts.main("chat")
    measured, warm = workload_prompts.read_prompts("chat")
    return measured.to_dicts(), warm.to_dicts()


def split(project: Path) -> list[dict[str, Any]]:
    """Return the eval split's rows in the order of the stage."""
    rows = {row["id"]: row for row in pl.read_parquet(project / "data/sampled/eval/*.parquet").to_dicts()}
    return [rows[name] for name in ids(ask(project, "eval", num_prompts=None)[0])]


def replace_split(rows: list[dict[str, Any]]) -> None:
    """Replace the eval split by `rows`."""
    sampled = Path("data/sampled")
    if sampled.is_symlink():
        sampled.unlink()
    write_sampled("eval", rows)


def ids(rows: list[dict[str, Any]]) -> list[str]:
    return [row["id"] for row in rows]


# --- the eval split --------------------------------------------------------------------------------------------------


def test_images_are_copied(project: Path) -> None:
    replace_split([{**row, "images": [f"images/{row['id']}.png"]} for row in split(project)])
    rows = split(project)
    assert [row["images"] for row in ask(project, "eval")[0]] == [row["images"] for row in rows[:5]]
    assert rows[0]["images"] == [f"images/{rows[0]['id']}.png"]
    with pytest.raises(ValueError, match="has no prompt without images from 0 on"):
        ask(project, "chat", **RANDOM)


@pytest.mark.parametrize(
    ("changes", "measured", "warm"),
    [
        ({"start": 2, "stop": 5, "num_prompts": None}, [2, 3, 4], [5]),
        ({"start": 2, "stop": 5, "num_prompts": 2}, [2, 3], [4]),
        ({"start": 10, "num_prompts": None, "warmup": 3}, [10, 11], [0, 1, 2]),
        ({"num_prompts": None, "warmup": 2}, [*range(12)], [0, 1]),
        ({"num_prompts": 11, "warmup": 4}, [*range(11)], [11, 0, 1, 2]),
        ({"num_prompts": 1, "warmup": 0}, [0], []),
        ({"start": 11, "num_prompts": 1, "warmup": 14}, [11], [*range(11), 11, 11, 11]),
    ],
)
def test_which_are_measured_and_which_warm_up(
    project: Path, changes: dict[str, Any], measured: list[int], warm: list[int]
) -> None:
    """Warm-up prompts are not measured ones where others exist: a prefix cache would hold measured prompts."""
    names = ids(split(project))
    found = ask(project, "eval", **changes)
    assert tuple(map(ids, found)) == ([names[n] for n in measured], [names[n] for n in warm])


# --- sets ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", talking.SETS)
def test_a_sets_prompts_are_what_transformers_renders(project: Path, name: str) -> None:
    measured, warm = ask(project, name, turns="all", num_prompts=6, warmup=4)
    tokenizer = AutoTokenizer.from_pretrained("tiny")
    problems = talking.read_set(name)
    assert ids([*measured, *warm]) == [p.id for p in [*problems, *problems[:2]]]
    for row, problem in zip(measured, problems, strict=False):
        messages = [{"role": "user", "content": problem.turns[0]}]
        whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        assert row["prompt_ids"] == whole["input_ids"] and row["messages"] == messages
        assert row["later"] == (problem.turns[1:] or None) and row["reference"] == problem.reference


def test_a_prompt_without_room_for_an_answer_is_named(project: Path) -> None:
    long = prompt_sets.PromptProblem("long", ["word " * 3000], None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_sets, "read_prompt_set", lambda *_: [long])
        with pytest.raises(
            ValueError, match=r"workload chat, prompt long has \d{4} tokens, expected fewer than the 2048 of"
        ):
            ask(project, "alpaca")


# --- random lengths --------------------------------------------------------------------------------------------------


def sglang(texts: list[list[int]], lengths: list[int]) -> set[tuple[int, ...]]:
    """Return what bench_serving's sample_random_requests (SGLang 0.5.17) makes of each row and length: cut, or repeated and
    cut; from any first token, which is our difference."""
    made = set()
    for row in texts:
        for first in range(len(row)):
            turned = row[first:] + row[:first]
            for length in lengths:
                ratio = (length + len(turned) - 1) // len(turned)
                made.add(tuple(turned[:length] if len(turned) > length else (turned * ratio)[:length]))
    return made


def test_random_prompts_are_rows_cut_or_repeated(project: Path) -> None:
    measured, warm = ask(project, "chat", **RANDOM)
    assert len(measured) == 40 and len(warm) == 3
    lengths = [len(row["prompt_ids"]) for row in [*measured, *warm]]
    texts = [row["prompt_ids"] for row in split(project)]
    possible = sglang(texts, sorted(set(lengths)))
    assert all(tuple(row["prompt_ids"]) in possible for row in [*measured, *warm])
    assert len({tuple(row["prompt_ids"]) for row in [*measured, *warm]}) == 43  # also of 12 rows
    assert min(map(len, texts)) < min(lengths), "nothing was repeated"


def test_a_few_prompts_are_from_every_file(project: Path) -> None:
    """Bug: num_prompts took the eval split's first rows, all from its first file."""
    one = split(project)[0]
    rows = [{**one, "id": f"{name}.{n}", "prompt_ids": [n % 9, 7, len(name), n]}
            for name, count in (("large", 300), ("little", 100)) for n in range(count)]  # fmt: skip
    replace_split(rows)
    found = ids(ask(project, "eval", num_prompts=80)[0])
    assert 10 <= sum(name.startswith("little") for name in found) <= 30
    replace_split(rows[::-1])
    assert ids(ask(project, "eval", num_prompts=80)[0]) == found
    assert ids(ask(project, "eval", num_prompts=20)[0]) == found[:20]


# --- written ---------------------------------------------------------------------------------------------------------


def test_stages_that_run_no_model_import_none() -> None:
    """Bug: prepare_prompts imported torch and transformers for the target's facts, 3 s of a core."""
    stages = ", ".join(f"stages.{name}" for name in ("inputs", "fix_data", "prepare_prompts", "report"))
    code = f"import sys, {stages}; print(*{{'torch', 'transformers', 'safetensors'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "\n"
