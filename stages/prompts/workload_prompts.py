"""Read and write data/prompts/WORKLOAD.parquet: a workload's prompts as the target reads them (prepare_prompts -> benchmarks)."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from stages.data import conversations

SALT = b"prepare_prompts"  # not that of the hashes that select rows for sampling
PROMPTS_FOLDER = Path("data/prompts")
PROMPTS_SCHEMA = pl.Schema(
    {
        "id": pl.String,  # unique among the measured prompts
        "prompt_ids": pl.List(pl.Int32),  # of the first turn, through the chat template; image tokens expanded
        "messages": pl.List(pl.Struct({"role": pl.String, "content": pl.String})),  # first turn; published sets only
        "later": pl.List(pl.String),  # the user's message in each later turn; null without any
        "images": pl.List(pl.String),  # paths, in the prompt's order; null without images
        "length_share": pl.Float64,  # of the workload's max_new_tokens; drawn for random lengths, else 1
        "answer_tokens": pl.Int32,  # of the stored answer; of the eval split only
        "reference": pl.String,  # grades the first turn's answer (stages/grading/grade.py); null: not graded
        "warmup": pl.Boolean,  # run before the measurement, and counted nowhere
    }
)


@dataclass(frozen=True)
class WorkloadPrompt:
    """One prompt of a workload; the fields are columns of PROMPTS_SCHEMA."""

    id: str
    prompt_ids: list[int]
    messages: list[dict[str, str]] | None = None
    later: list[str] | None = None
    images: list[str] | None = None
    length_share: float = 1.0
    answer_tokens: int | None = None
    reference: str | None = None


def locate_prompts(workload: str) -> Path:
    return PROMPTS_FOLDER / f"{workload}.parquet"


def hash_prompt(ids: list[int], images: list[str] | None) -> bytes:
    """Return the key by which prompts of the eval split are ordered."""
    names = [image.encode() for image in images or []]
    return hashlib.sha256(b"\0".join([SALT, *names, np.array(ids, "<i4").tobytes()])).digest()


def compute_max_new_tokens(length_share: float, max_new_tokens: int) -> int:
    """Return the most tokens of a row's answer, `length_share` of the workload's `max_new_tokens`."""
    return max(1, round(length_share * max_new_tokens))


def write_prompts(workload: str, measured: list[WorkloadPrompt], warmup: list[WorkloadPrompt]) -> None:
    """Write the prompts to measure and those of the warm-up."""
    rows = [vars(row) | {"warmup": flag} for part, flag in ((measured, False), (warmup, True)) for row in part]
    conversations.write_table(locate_prompts(workload), pl.DataFrame(rows, schema=PROMPTS_SCHEMA), PROMPTS_SCHEMA)


def read_prompts(workload: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return (prompts to measure, prompts of the warm-up) as PROMPTS_SCHEMA. Raise ValueError where the file is missing."""
    rows = conversations.read_table(locate_prompts(workload), PROMPTS_SCHEMA, f"prepare_prompts@{workload}", None)
    return rows.filter(~pl.col("warmup")), rows.filter("warmup")


def list_rows(prompts: pl.DataFrame) -> list[WorkloadPrompt]:
    """Return the rows of a PROMPTS_SCHEMA frame."""
    return [WorkloadPrompt(**row) for row in prompts.drop("warmup").iter_rows(named=True)]


def check_references(workload: str, rows: pl.DataFrame) -> None:
    """Raise ValueError where a prompt of a graded workload has no reference, before anything is decoded."""
    if num_without_reference := rows["reference"].null_count():
        raise ValueError(
            f"benchmark.workloads.{workload}.grade is true, expected a reference to grade each prompt by, found none for "
            f"{num_without_reference} of {len(rows)}; take the set as its authors publish it, or set grade to false"
        )
