"""Hidden states of rows with pictures: they come back as they went, take what they must, and are refused when altered."""

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
import torch

from stages.hidden_states import format, reader, writer
from stages.hidden_states.reader import HiddenStatesReader
from tests.hidden_states.made_up_rows import assert_same, make_pictured_rows, read_refusal, shards


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, format.FP8])
@pytest.mark.parametrize("shard_bytes", [1, 1_500, 10**9])
def test_rows_with_pictures_come_back(tmp_path: Path, dtype: torch.dtype, shard_bytes: int) -> None:
    """By both readers: in order, and at random."""
    rows = make_pictured_rows()
    assert writer.write_rows(tmp_path, iter(rows), dtype, shard_bytes) == len(rows)

    def cast(numbers: torch.Tensor | None, parts: int = 1) -> torch.Tensor:
        assert numbers is not None
        return format.decode_numbers(*format.encode_numbers(numbers, dtype, parts))

    expected = [
        replace(r, features=cast(r.features, 3), last=cast(r.last), image_embeddings=cast(r.image_embeddings))
        for r in rows
    ]
    assert_same(list(reader.read_rows(tmp_path)), expected)
    store = HiddenStatesReader(tmp_path)
    found = [store.read_row(i, torch.float32) for i in (5, 2, 0, 3, 1, 4)]
    for row in found:
        assert row.image_embeddings is not None and row.image_embeddings.dtype == (
            torch.float32 if dtype == format.FP8 else dtype
        )
    as_float = [
        replace(r, **{n: getattr(r, n).float() for n in ("features", "last", "image_embeddings")}) for r in found
    ]
    assert_same(as_float, [expected[i] for i in (5, 2, 0, 3, 1, 4)])
    assert (len(shards(tmp_path)) == len(rows)) == (shard_bytes == 1)


@pytest.mark.parametrize("column", ["visual_offset", "visual_length"])
@pytest.mark.parametrize("by", [1, -1, 100])
def test_an_index_that_misplaces_pictures_is_refused(tmp_path: Path, column: str, by: int) -> None:
    writer.write_rows(tmp_path, make_pictured_rows(), torch.float32, 10**9)
    path = tmp_path / "index.parquet"
    pl.read_parquet(path).with_columns(pl.col(column) + by).write_parquet(path)
    assert "its rows in index.parquet leave tokens out or have them twice" in read_refusal(tmp_path)
