"""Hidden states of rows with pictures: they come back as they went, take what they must, and are refused when altered."""

import shutil
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
import torch
from safetensors.torch import load_file

from stages.hidden_states import format, reader, writer
from stages.hidden_states.reader import HiddenStatesReader
from tests.hidden_states.made_up_rows import (
    LENGTHS,
    PICTURES,
    H,
    assert_same,
    made_up,
    make_pictured_rows,
    read_refusal,
    shards,
)


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


def test_safetensors_reads_shards_with_pictures(tmp_path: Path) -> None:
    """Pieces lie end to end, in the order of the tokens that stand for them; text's shards hold nothing of the kind."""
    rows = make_pictured_rows()
    writer.write_rows(tmp_path, rows, format.FP8, 10**9)
    tokens, pieces = sum(LENGTHS), sum(PICTURES)
    found = load_file(shards(tmp_path)[0])
    assert {n: (tuple(t.shape), t.dtype) for n, t in found.items() if n not in ("features", "last", "ids", "mask")} == {
        "features_scale": ((tokens, 3), torch.float32), "last_scale": ((tokens, 1), torch.float32),
        "visual_scale": ((pieces, 1), torch.float32), "visual": ((pieces, H), torch.float8_e4m3fn),
        "positions": ((tokens, 3), torch.int32), "pictured": ((-(-tokens // 8),), torch.uint8),
    }  # fmt: skip
    bits = "".join(f"{byte:08b}" for byte in found["pictured"].tolist())[:tokens]
    assert bits == "".join(str(int(b)) for r in rows if r.image_token_mask is not None for b in r.image_token_mask)
    index = pl.read_parquet(tmp_path / "index.parquet")
    assert index["visual_length"].to_list() == list(PICTURES)
    assert index["visual_offset"].to_list() == [0, 2, 2, 7, 16, 19]
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    writer.write_rows(tmp_path, made_up(), format.FP8, 10**9)
    assert "visual_length" not in pl.read_parquet(tmp_path / "index.parquet").columns


@pytest.mark.parametrize(("dtype", "itemsize", "scale"), [(torch.float32, 4, 0), (torch.float8_e4m3fn, 1, 4)])
def test_pictures_take_what_is_said(tmp_path: Path, dtype: torch.dtype, itemsize: int, scale: int) -> None:
    """Three int32 and a bit a token more, H numbers a piece."""
    writer.write_rows(tmp_path, make_pictured_rows(), dtype, 10**9)
    tokens, pieces = sum(LENGTHS), sum(PICTURES)
    by_hand = tokens * (4 * H * itemsize + 4 * scale + 4 + 12) + 2 * -(-tokens // 8) + pieces * (H * itemsize + scale)
    assert by_hand <= shards(tmp_path)[0].stat().st_size <= by_hand + 960  # the header names seven tensors, or ten
    num_bytes = tokens * format.count_token_bytes(3, H, dtype, is_multimodal=True) + pieces * format.count_visual_bytes(
        H, dtype
    )
    assert num_bytes == pytest.approx(by_hand, abs=2)


def test_any_flipped_bit_of_pictures_is_refused(tmp_path: Path) -> None:
    rows = [replace(make_pictured_rows()[0]), replace(make_pictured_rows()[2])]
    writer.write_rows(tmp_path, rows, torch.float32, 10**9)
    path = shards(tmp_path)[0]
    whole = path.read_bytes()
    unused = {len(whole) - 1 - n * 3 for n in (0, 1)}  # 21 tokens: bits 2 to 0 of the last byte of both masks
    header = 8 + int.from_bytes(whole[:8], "little")
    # Every byte of the header, and of the numbers enough to be in each tensor; the test below has them all.
    for byte in (*range(header), *range(header, len(whole), 7), *sorted(unused)):
        spoilt = bytearray(whole)
        spoilt[byte] ^= 1 << (byte % 3 if byte in unused else byte % 8)
        path.write_bytes(spoilt)
        if byte in unused:
            assert_same(list(reader.read_rows(tmp_path)), rows)
        else:
            assert str(path) in read_refusal(tmp_path), f"byte {byte}"


@pytest.mark.parametrize("column", ["visual_offset", "visual_length"])
@pytest.mark.parametrize("by", [1, -1, 100])
def test_an_index_that_misplaces_pictures_is_refused(tmp_path: Path, column: str, by: int) -> None:
    writer.write_rows(tmp_path, make_pictured_rows(), torch.float32, 10**9)
    path = tmp_path / "index.parquet"
    pl.read_parquet(path).with_columns(pl.col(column) + by).write_parquet(path)
    assert "does not match its checksum" in read_refusal(tmp_path)


@pytest.mark.parametrize("is_multimodal", [True, False])
def test_an_index_of_the_other_kind_of_target_is_refused(tmp_path: Path, is_multimodal: bool) -> None:
    writer.write_rows(tmp_path, make_pictured_rows() if is_multimodal else made_up(), torch.float32, 10**9)
    path = tmp_path / "index.parquet"
    index = pl.read_parquet(path)
    if is_multimodal:
        index = index.drop("visual_offset", "visual_length")
    else:
        index = index.with_columns(visual_offset=pl.lit(0, pl.Int64), visual_length=pl.lit(0, pl.Int64))
    index.write_parquet(path)
    assert "does not match its checksum" in read_refusal(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_picture_with_nan_is_refused_by_its_row(tmp_path: Path, dtype: torch.dtype) -> None:
    rows = make_pictured_rows()
    assert rows[3].image_embeddings is not None
    rows[3].image_embeddings[8, 1] = float("nan")
    writer.write_rows(tmp_path, rows, dtype, 10**9)
    assert "row w.3 holds NaN or infinity" in read_refusal(tmp_path)
