"""Hidden states whose files are altered, or whose numbers are none, are refused by name."""

from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
import torch

from stages.hidden_states import format, reader, writer
from tests.hidden_states.made_up_rows import assert_same, made_up, read_refusal, shards


def test_any_flipped_bit_of_a_shard_is_refused(tmp_path: Path) -> None:
    """One bit in every byte, header and numbers; only bits past the last token's mask mean nothing."""
    rows = made_up((2, 3))
    writer.write_rows(tmp_path, rows, torch.float32, 10**9)
    path = shards(tmp_path)[0]
    whole = path.read_bytes()
    for byte in range(len(whole)):
        spoilt = bytearray(whole)
        spoilt[byte] ^= 1 << byte % 3
        path.write_bytes(spoilt)
        if byte == len(whole) - 1:  # tokens 0 to 4 have the mask's bits 7 to 3: a lower one means nothing
            assert_same(list(reader.read_rows(tmp_path)), rows)
        else:
            assert str(path) in read_refusal(tmp_path), f"byte {byte}"


READS: list[Callable[[Path], object]] = [lambda folder: list(reader.read_rows(folder)), reader.digest_folder]
by_every_reader = pytest.mark.parametrize("reads", READS, ids=["read", "digest"])


@by_every_reader
def test_a_missing_index_is_refused(written: Path, reads: Callable[[Path], object]) -> None:
    """Bug: `digest`, which train_draft asks first, ended in a traceback."""
    (written / "index.parquet").unlink()
    with pytest.raises(ValueError, match=r"index\.parquet not found; run: dvc repro extract_hiddens$"):
        reads(written)


@by_every_reader
@pytest.mark.parametrize(
    "change",
    [
        lambda index: index[1:],
        lambda index: index[:-1],
        lambda index: index.filter(pl.col("shard") != index["shard"][-1]),
        lambda index: pl.concat([index[:2], index[1:]]),
        lambda index: index.reverse(),
        lambda index: index.with_columns(pl.col("offset") + 1),
        lambda index: index.with_columns(pl.col("length") - 1),
        lambda index: index.with_columns(pl.col("shard").replace({"shard-00000.safetensors": "../shard.safetensors"})),
    ],
    ids=["first row", "last row", "last shard", "doubled", "order", "offset", "length", "a shard elsewhere"],
)
def test_an_index_of_other_rows_is_refused(
    written: Path, reads: Callable[[Path], object], change: Callable[[pl.DataFrame], pl.DataFrame]
) -> None:
    """Bug: hidden states whose index had rows dropped or doubled were read, and trained on."""
    path = written / "index.parquet"
    change(pl.read_parquet(path)).write_parquet(path)
    with pytest.raises(ValueError, match=r"^[^\n]*index[^\n]*; run: dvc repro -f -s extract_hiddens$"):
        reads(written)


@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
def test_numbers_of_another_dtype_are_refused(tmp_path: Path, stored: str) -> None:
    """Bug: a header that says BF16 of numbers in F16 has the same sizes and checksums: other numbers were read."""
    writer.write_rows(tmp_path, made_up((2, 3)), format.DTYPES[stored], 10**9)
    (path,) = shards(tmp_path)
    names, whole = (b'"F16"', b'"BF16"'), path.read_bytes()
    old, new = names if stored == "float16" else names[::-1]
    size = int.from_bytes(whole[:8], "little")
    header = whole[8 : 8 + size].replace(old, new).rstrip().ljust(size)
    path.write_bytes(whole[:8] + header + whole[8 + size :])
    assert "does not match its checksum" in read_refusal(tmp_path)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["features", "last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_row_with_nan_is_refused_by_name(tmp_path: Path, where: str, number: float, dtype: torch.dtype) -> None:
    rows = made_up()
    getattr(rows[3], where)[4, 2] = number
    writer.write_rows(tmp_path, rows, dtype, 10**9)
    assert pl.read_parquet(tmp_path / "index.parquet")["finite"].to_list() == [True, True, True, False, True, True]
    message = read_refusal(tmp_path)
    assert "row w.3 holds NaN or infinity, expected finite hidden states; set extract_hiddens.dtype" in message


def test_what_the_index_alone_says_of_a_row_is_checked_too(written: Path) -> None:
    """Bug: the checksum covered the tensors only; a flipped bit in prompt_length or the name was read as true."""
    path = written / "index.parquet"
    whole = pl.read_parquet(path)
    for change in (
        pl.col("id").str.replace("z", "a"),
        pl.col("prompt_length") + 1,
        pl.col("finish_reason").replace({"stop": "length"}),
    ):
        whole.with_columns(change).write_parquet(path)
        assert "does not match its checksum" in read_refusal(written)
