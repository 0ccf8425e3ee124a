"""Plan shards and batches from row lengths alone, so that any process, or a later run, makes the same bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import torch

from stages.hidden_states.format import RowHeader, count_token_bytes, count_visual_bytes


@dataclass(frozen=True)
class StoredRowSize:
    """Bytes of rows on disk."""

    num_feature_layers: int
    hidden_size: int
    dtype: torch.dtype
    image_token_id: int | None = None

    @property
    def is_multimodal(self) -> bool:
        return self.image_token_id is not None

    @property
    def token_bytes(self) -> float:
        return count_token_bytes(self.num_feature_layers, self.hidden_size, self.dtype, self.is_multimodal)

    @property
    def image_token_bytes(self) -> int:
        """Bytes beyond those of any token."""
        return count_visual_bytes(self.hidden_size, self.dtype)

    def count_image_tokens(self, rows: pl.DataFrame) -> list[int]:
        """Return the number of image tokens of each row."""
        if self.image_token_id is None:
            return [0] * len(rows)
        return rows.select(pl.col("prompt_ids").list.count_matches(self.image_token_id)).to_series().to_list()

    def count_bytes(self, rows: pl.DataFrame) -> float:
        """Return the bytes of these rows."""
        return count_tokens(rows) * self.token_bytes + sum(self.count_image_tokens(rows)) * self.image_token_bytes


TOKENS_ONLY_SIZE = StoredRowSize(0, 0, torch.float32)


@dataclass(frozen=True)
class ShardTask:
    """One shard to make: rows of a split, in the order they are stored."""

    split: str
    number: int
    rows: pl.DataFrame
    folder: Path  # unfinished work, on the disk that will hold the shard
    size: StoredRowSize

    @property
    def path(self) -> Path:
        return self.folder / name_shard(self.number)

    @property
    def entries_path(self) -> Path:
        """The shard's part of the index, as JSON; written last, so its presence means the shard is complete."""
        return self.path.with_suffix(".json")

    def is_written(self) -> bool:
        return self.entries_path.exists() or (self.folder / "index.parquet").exists()

    def make_headers(self) -> list[RowHeader]:
        return make_headers(self.rows, self.size.image_token_id)


def make_headers(rows: pl.DataFrame, image_token_id: int | None) -> list[RowHeader]:
    """Return the headers of rows of data/sampled."""
    headers = []
    for row_id, prompt, answer, reason in rows.select("id", "prompt_ids", "answer_ids", "finish_reason").iter_rows():
        ids = torch.tensor(prompt + answer, dtype=torch.int32)
        header = RowHeader(
            id=row_id,
            ids=ids,
            mask=torch.arange(len(ids)) >= len(prompt),
            prompt_length=len(prompt),
            finish_reason=reason,
            image_token_mask=None if image_token_id is None else ids == image_token_id,
        )
        headers.append(header)
    return headers


def make_length_expr() -> pl.Expr:
    """Return the expression of a row's number of tokens."""
    return pl.col("prompt_ids").list.len() + pl.col("answer_ids").list.len()


def fit_rows(table: pl.DataFrame, max_length: int, truncate: bool) -> pl.DataFrame:
    """Return the rows of at most `max_length` tokens; with `truncate` also longer ones, with their answers cut to fit.

    A cut answer is one that ended by its length. A row whose prompt leaves no token of the answer has nothing to learn from,
    and is dropped either way.
    """
    if not truncate:
        return table.filter(make_length_expr() <= max_length)
    room = max_length - pl.col("prompt_ids").list.len().cast(pl.Int64)
    is_cut = make_length_expr() > max_length
    return table.filter(room > 0).with_columns(
        answer_ids=pl.when(is_cut).then(pl.col("answer_ids").list.head(room)).otherwise("answer_ids"),
        finish_reason=pl.when(is_cut).then(pl.lit("length")).otherwise("finish_reason"),
    )


def list_lengths(rows: pl.DataFrame) -> list[int]:
    return rows.select(make_length_expr()).to_series().to_list()


def count_tokens(rows: pl.DataFrame) -> int:
    return int(rows.select(make_length_expr().sum()).item() or 0)


def plan_split(split: str, table: pl.DataFrame, size: StoredRowSize, shard_bytes: int, folder: Path) -> list[ShardTask]:
    """Return the shards of a split. Longest rows first: batches hold like lengths, and memory runs out early if at all."""
    rows = table.sort(make_length_expr(), "id", descending=[True, False])
    image_tokens, bytes_per_token = size.count_image_tokens(rows), (size.token_bytes, size.image_token_bytes)
    spans = plan_shards(list_lengths(rows), image_tokens, *bytes_per_token, shard_bytes)
    return [ShardTask(split, number, rows[span.start : span.stop], folder, size) for number, span in enumerate(spans)]


def plan_shards(
    lengths: Sequence[int], image_tokens: Sequence[int], token_bytes: float, image_token_bytes: int, shard_bytes: int
) -> list[range]:
    """Return the consecutive rows of each shard; the row that reaches `shard_bytes` is a shard's last."""
    shards, first, size = [], 0, 0.0
    for number, (length, image_count) in enumerate(zip(lengths, image_tokens, strict=True)):
        size += length * token_bytes + image_count * image_token_bytes
        if size >= shard_bytes:
            shards.append(range(first, number + 1))
            first, size = number + 1, 0.0
    return [*shards, range(first, len(lengths))] if first < len(lengths) else shards


def name_shard(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def split_batches(batch_tokens: int, padded: bool, lengths: list[int]) -> list[range]:
    """Cut rows, longest first, into batches of at most `batch_tokens` tokens (padding counted if `padded`), or of one row."""
    batches, first, tokens = [], 0, 0
    for row, length in enumerate(lengths):
        size = lengths[first] if padded else length
        if row > first and tokens + size > batch_tokens:
            batches.append(range(first, row))
            first, tokens = row, 0
        tokens += lengths[first] if padded else length
    return [*batches, range(first, len(lengths))]
