"""data/prompts/WORKLOAD.parquet: what a workload asks, as the target reads it (prepare_prompts -> both benchmarks)."""

from pathlib import Path

import polars as pl

from stages.formats import conversations

FOLDER = Path("data/prompts")
ASKED = pl.Schema(
    {
        "id": pl.String,
        "prompt_ids": pl.List(pl.Int32),  # of the first turn, through the chat template; pictures' tokens expanded
        "messages": pl.List(
            pl.Struct({"role": pl.String, "content": pl.String})
        ),  # of the first turn; null: eval, random
        "later": pl.List(pl.String),  # what the user says in each later turn; null where there is none
        "images": pl.List(pl.String),  # paths, in the order of their places; null for text
        "length_share": pl.Float64,  # of the workload's max_new_tokens: drawn for random lengths, else 1
        "reference": pl.String,  # what answers are graded by, in the set's own form (stages/serving/grades.py); null: none
        "warmup": pl.Boolean,  # asked before, and counted nowhere
    }
)


def path(workload: str) -> Path:
    return FOLDER / f"{workload}.parquet"


def write(workload: str, rows: pl.DataFrame) -> None:
    conversations.write(path(workload), rows, ASKED)


def read(workload: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    """(those to measure, those to warm up with). Raises ValueError naming what to run where there are none."""
    rows = conversations.read(path(workload), ASKED, f"prepare_prompts@{workload}", None)
    return rows.filter(~pl.col("warmup")), rows.filter("warmup")
