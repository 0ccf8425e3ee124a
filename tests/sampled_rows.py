"""Rows of data/sampled, as sample_target writes them, for projects of tests."""

from pathlib import Path
from typing import Any

import polars as pl

from stages.data import conversations


def sampled_row(name: str, number: int, prompt: list[int], answer: list[int], **changes: Any) -> dict[str, Any]:
    """A row of text at temperature 0 whose answer was cut."""
    return {
        "id": name, "source_row": number, "verdict": "clean", "temperature": 0.0, "top_p": None, "prompt_ids": prompt,
        "answer_ids": answer, "finish_reason": "length", "images": None,
    } | changes  # fmt: skip


def write_sampled(split: str, rows: list[dict[str, Any]], project: Path = Path()) -> None:
    table = pl.DataFrame(rows, schema=conversations.SAMPLED_SCHEMA)
    path = project / "data/sampled" / split / conversations.name_shard(0)
    conversations.write_table(path, table, conversations.SAMPLED_SCHEMA)
