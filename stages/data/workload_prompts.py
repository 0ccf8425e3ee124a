"""data/prompts/WORKLOAD.parquet: what a workload asks, as the target reads it (prepare_prompts -> both benchmarks)."""

from pathlib import Path

import polars as pl

from stages.data import conversations

PROMPTS_FOLDER = Path("data/prompts")
PROMPTS_SCHEMA = pl.Schema(
    {
        "id": pl.String,  # each row's own, but of the warm-up
        "prompt_ids": pl.List(pl.Int32),  # of the first turn, through the chat template; pictures' tokens expanded
        "messages": pl.List(pl.Struct({"role": pl.String, "content": pl.String})),  # of the first turn; of sets only
        "later": pl.List(pl.String),  # what the user says in each later turn; null where there is none
        "images": pl.List(pl.String),  # paths, in the order of their places; null for text
        "length_share": pl.Float64,  # of the workload's max_new_tokens: drawn for random lengths, else 1
        "reference": pl.String,  # what the first turn's answer is graded by (stages/grading/grade.py); null: nothing
        "warmup": pl.Boolean,  # asked before, and counted nowhere
    }
)


def locate_prompts(workload: str) -> Path:
    return PROMPTS_FOLDER / f"{workload}.parquet"


def compute_max_new_tokens(length_share: float, max_new_tokens: int) -> int:
    """How long a row's answer may be, where the workload's may have `max_new_tokens`."""
    return max(1, round(length_share * max_new_tokens))


def write_prompts(workload: str, rows: pl.DataFrame) -> None:
    conversations.write_table(locate_prompts(workload), rows, PROMPTS_SCHEMA)


def read_prompts(workload: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    """(those to measure, those to warm up with). Raises ValueError naming what to run where there are none."""
    rows = conversations.read_table(locate_prompts(workload), PROMPTS_SCHEMA, f"prepare_prompts@{workload}", None)
    return rows.filter(~pl.col("warmup")), rows.filter("warmup")


def check_references(workload: str, rows: pl.DataFrame) -> None:
    """Raises ValueError, before anything is decoded, where answers shall be graded and nothing says what is right."""
    if without := rows["reference"].null_count():
        raise ValueError(
            f"benchmark.workloads.{workload}.grade is true, but {without} of its {len(rows)} prompts have no answer to "
            "grade by, expected one for each: MT-bench's shape of a set may lack them, and HumanEval's tests always. Take "
            "the set as its authors publish it, or set grade to false"
        )
