"""Read and write conversations: Parquet tables with a fixed schema, before and after sampling the target.

`FIXED_SCHEMA` (fix_data -> sample_target): whole conversations as messages, with source and verdict of each row.
`SAMPLED_SCHEMA` (sample_target -> extract_hiddens, benchmark): one row per answer, as token ids: the prompt exactly as a
server renders it, and the target's own answer, which is the loss span. A folder of shards, part-00000.parquet, ...
(parquet_shards.py), since sampling may take days.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from stages.runtime import atomic


def describe_origin(source: str, source_row: int) -> str:
    """Return the file, as seen from fix_data.raw, and the row in it, counted from 0."""
    return f"{source}, row {source_row}"


ROW_GROUP_SIZE = 1 << 14  # fixed, so that the same rows make the same file
IMAGE_PLACEHOLDER = "<image>"  # marks an image's position in a text, as in LLaVA's data

FIXED_SCHEMA = pl.Schema(
    {
        "id": pl.String,
        "messages": pl.List(pl.Struct({"role": pl.String, "content": pl.String})),
        "tools": pl.String,  # JSON as the export had it; null without tools (likewise the next four columns)
        "tool_calls": pl.List(pl.String),  # one per message, JSON; of a tool's message {tool_call_id, name}
        "reasoning": pl.List(pl.String),  # one per message
        "trained": pl.List(pl.Boolean),  # one per message: False for an answer that is not to be learned
        "images": pl.List(pl.String),  # paths, in the order of the texts' <image>
        "source": pl.String,  # the file, relative to fix_data.raw
        "source_row": pl.Int32,  # line or row of that file, counted from 0
        "verdict": pl.String,  # "clean" or "repaired:rule,rule"
    }
)
SAMPLED_SCHEMA = pl.Schema(
    {
        "id": pl.String,  # "<conversation id>.<turn>"
        "prompt_ids": pl.List(pl.Int32),  # through the chat template, the assistant's header included
        "answer_ids": pl.List(pl.Int32),  # the target's own tokens, its end token included unless cut by length
        "finish_reason": pl.String,  # "stop" or "length"; an answer cut by length is not a complete answer
        "temperature": pl.Float32,  # sampling temperature; null where the data's own answer is kept
        "top_p": pl.Float32,  # null where nothing was sampled, also at temperature 0
        "source_row": pl.Int32,
        "verdict": pl.String,
        "images": pl.List(pl.String),  # paths, in the prompt's order; null without images
    }
)


@dataclass(frozen=True)
class SampledRow:
    """A row of SAMPLED_SCHEMA."""

    id: str
    prompt_ids: list[int]
    answer_ids: list[int]
    finish_reason: str
    temperature: float | None
    top_p: float | None
    source_row: int
    verdict: str
    images: list[str] | None


def write_table(path: Path, rows: pl.DataFrame, schema: pl.Schema) -> None:
    """Write `rows` atomically; they must have exactly the columns and types of `schema`."""
    assert rows.schema == schema, f"{path}: {rows.schema} is not {schema}"
    with atomic.write_file(path) as temporary:
        rows.write_parquet(temporary)


def stream_table(path: Path, rows: pl.LazyFrame, schema: pl.Schema) -> None:
    """Write `rows` atomically, in order, by streaming: they are never whole in memory."""
    assert (found := rows.collect_schema()) == schema, f"{path}: {found} is not {schema}"
    with atomic.write_file(path) as temporary:
        # Level 1 takes half the time of polars' default, for a fifth more bytes.
        options = {"compression": "zstd", "compression_level": 1, "row_group_size": ROW_GROUP_SIZE}
        rows.sink_parquet(temporary, maintain_order=True, engine="streaming", **options)


def name_shard(number: int) -> str:
    return f"part-{number:05d}.parquet"


def read_table(path: Path, schema: pl.Schema, made_by: str, rows: int | None = None) -> pl.DataFrame:
    """Return the first `rows` rows (None: all) of a file, or of a folder of shards in order.

    Raises:
        ValueError: naming the file and the stage to run, where it is missing, broken or of another schema, or where a
            shard is missing.
    """
    files = _list_shards(path, made_by) if path.is_dir() else [path]
    tables: list[pl.DataFrame] = []
    for file in files:
        left = None if rows is None else rows - sum(map(len, tables))
        if tables and left == 0:
            break
        tables.append(_read_parquet(file, schema, made_by, left))
    return pl.concat(tables)


def read_image_paths(path: Path, made_by: str) -> dict[str, list[str]]:
    """Return id -> image paths of the rows with images in a folder of SAMPLED_SCHEMA shards. Raise ValueError as `read_table`."""
    paths: dict[str, list[str]] = {}
    for file in _list_shards(path, made_by):
        _read_parquet(file, SAMPLED_SCHEMA, made_by, 0)
        with atomic.guard_artifact(file, "Parquet", made_by):
            with_images = pl.read_parquet(file, columns=["id", "images"]).filter(pl.col("images").list.len() > 0)
        paths |= dict(with_images.iter_rows())
    return paths


def read_batches(path: Path, schema: pl.Schema, made_by: str) -> Iterator[pl.DataFrame]:
    """Yield the rows of one file, ROW_GROUP_SIZE at a time: a table of millions is never whole in memory."""
    _read_parquet(path, schema, made_by, 0)
    for first in range(0, _count_rows(path, made_by, pl.len()), ROW_GROUP_SIZE):
        with atomic.guard_artifact(path, "Parquet", made_by):
            table = pl.scan_parquet(path).slice(first, ROW_GROUP_SIZE).collect(engine="streaming")
        yield table


def count_with_images(path: Path, made_by: str) -> int:
    """Return how many conversations of a FIXED_SCHEMA file have images."""
    return _count_rows(path, made_by, (pl.col("images").list.len() > 0).sum())


def _read_parquet(path: Path, schema: pl.Schema, made_by: str, rows: int | None) -> pl.DataFrame:
    with atomic.guard_artifact(path, "Parquet", made_by):
        table = pl.read_parquet(path, n_rows=rows)
    if table.schema != schema:
        found = f"{path} has columns {dict(table.schema)}, expected {dict(schema)}"
        raise atomic.BrokenArtifactError(found, atomic.format_rerun_hint(made_by))
    return table


def _count_rows(path: Path, made_by: str, count: pl.Expr) -> int:
    with atomic.guard_artifact(path, "Parquet", made_by):
        number = pl.scan_parquet(path).select(count).collect(engine="streaming").item()
    return int(number or 0)


def _list_shards(folder: Path, made_by: str) -> list[Path]:
    """Return the shards of a folder in order. Raise ValueError where one is missing: no reader may lose rows in silence."""
    numbers = sorted(
        int(match[1]) for f in folder.iterdir() if (match := re.fullmatch(r"part-(\d{5,})\.parquet", f.name))
    )
    if not numbers or numbers != list(range(len(numbers))):
        missing = next(n for n in range(len(numbers) + 1) if n not in numbers)
        raise ValueError(
            f"{folder / name_shard(missing)} not found among {len(numbers)} shards; run: dvc repro {made_by}"
        )
    return [folder / name_shard(number) for number in numbers]
