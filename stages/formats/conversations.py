"""Conversations on disk: Parquet tables with a fixed schema, before and after the target has answered.

`FIXED` (fix_data -> sample_target): whole conversations as messages, with where each row came from and its verdict.
`SAMPLED` (sample_target -> extract_hiddens, benchmark): one row per answer, as token ids: the prompt exactly as a
server would render it, and the target's own answer. The loss span is the answer.
"""

from pathlib import Path

import polars as pl

from stages.formats import atomic

ROW_GROUP = 1 << 14  # fixed, so that the same rows make the same file

FIXED = pl.Schema(
    {
        "id": pl.String,
        "messages": pl.List(pl.Struct({"role": pl.String, "content": pl.String})),
        "tools": pl.String,  # the tools on offer, JSON as the export had it; null where none, as in the three below
        "tool_calls": pl.List(pl.String),  # one per message, JSON
        "reasoning": pl.List(pl.String),  # one per message
        "images": pl.List(pl.String),  # paths, in the order of the texts' <image>
        "source": pl.String,  # the file, as seen from fix_data.raw
        "source_row": pl.Int32,  # line or row of that file, from 0
        "verdict": pl.String,  # "clean" or "repaired:rule,rule"
    }
)
SAMPLED = pl.Schema(
    {
        "id": pl.String,  # "<conversation id>.<turn>"
        "prompt_ids": pl.List(pl.Int32),  # through the chat template, up to and with the assistant's header
        "answer_ids": pl.List(pl.Int32),  # the target's own tokens, its end token included unless cut by length
        "finish_reason": pl.String,  # "stop" or "length"; an answer cut by length is not a complete answer
        "temperature": pl.Float32,
        "source_row": pl.Int32,
        "verdict": pl.String,
    }
)


def write(path: Path, rows: pl.DataFrame, schema: pl.Schema) -> None:
    """Atomically write `rows`, which must have exactly the columns and types of `schema`."""
    assert rows.schema == schema, f"{path}: {rows.schema} is not {schema}"
    with atomic.file(path) as temporary:
        rows.write_parquet(temporary)


def stream(path: Path, rows: pl.LazyFrame, schema: pl.Schema) -> None:
    """Atomically write `rows` in streaming: in their order, and never whole in memory."""
    assert (found := rows.collect_schema()) == schema, f"{path}: {found} is not {schema}"
    with atomic.file(path) as temporary:
        # Level 1: half the time of polars' own choice, and a fifth more bytes.
        how = {"compression": "zstd", "compression_level": 1, "row_group_size": ROW_GROUP}
        rows.sink_parquet(temporary, maintain_order=True, engine="streaming", **how)


def read(path: Path, schema: pl.Schema, made_by: str) -> pl.DataFrame:
    """Raises ValueError naming the file and the stage to run, where it is missing, broken or of another schema."""
    try:
        rows = pl.read_parquet(path)
    except FileNotFoundError:
        raise ValueError(f"{path} not found; run: dvc repro {made_by}") from None
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        raise ValueError(f"{path} is not readable Parquet ({error}); delete it and run: dvc repro {made_by}") from None
    if rows.schema != schema:
        raise ValueError(f"{path} has columns {dict(rows.schema)}, expected {dict(schema)}; run: dvc repro {made_by}")
    return rows
