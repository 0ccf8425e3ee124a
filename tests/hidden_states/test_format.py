"""Hidden states come back as they went, take what they must on disk, and are refused by name when altered."""

import json
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from stages.hidden_states import format, reader, shard_plan, writer
from stages.hidden_states.format import HiddenStatesRow
from stages.hidden_states.reader import HiddenStatesReader
from stages.runtime.atomic import Broken

H = 6  # hidden size
LENGTHS = (5, 1, 16, 9, 23, 2)


def made_up(lengths: tuple[int, ...] = LENGTHS) -> list[HiddenStatesRow]:
    """Rows of these lengths; the names are not in the alphabet's order, so that a sorted read shows."""
    g = torch.Generator().manual_seed(0)
    return [
        HiddenStatesRow(
            id=f"{'zyxwvu'[n]}.{n}",
            ids=torch.randint(0, 50_000, (t,), generator=g, dtype=torch.int32),
            mask=torch.randint(0, 2, (t,), generator=g).bool(),
            features=torch.randn(t, 3 * H, generator=g),  # [T, 3H]
            last=torch.randn(t, H, generator=g),  # [T, H]
            prompt_length=t // 2,
            finish_reason=("stop", "length")[n % 2],
        )
        for n, t in enumerate(lengths)
    ]


PICTURES = (2, 0, 5, 9, 3, 0)  # tokens that stand for pieces of pictures, of the rows of LENGTHS


def seen(pieces: tuple[int, ...] = PICTURES) -> list[HiddenStatesRow]:
    """The same rows of a target that sees; one of pictures only, some without any."""
    g = torch.Generator().manual_seed(1)
    rows = []
    for row, count in zip(made_up(), pieces, strict=True):
        pictured = torch.zeros(len(row.ids), dtype=torch.bool)
        pictured[torch.randperm(len(row.ids), generator=g)[:count]] = True
        positions = torch.randint(0, 100, (len(row.ids), 3), generator=g, dtype=torch.int32)
        rows.append(
            replace(
                row,
                positions=positions,
                image_token_mask=pictured,
                image_embeddings=torch.randn(count, H, generator=g) * 100,
            )
        )
    return rows


def assert_same(found: list[HiddenStatesRow], expected: list[HiddenStatesRow]) -> None:
    assert [r.id for r in found] == [r.id for r in expected]
    for row, was in zip(found, expected, strict=True):
        assert (row.prompt_length, row.finish_reason) == (was.prompt_length, was.finish_reason)
        for name in ("ids", "mask", "features", "last", "positions", "image_token_mask", "image_embeddings"):
            tensor, expect = getattr(row, name), getattr(was, name)
            if expect is None:
                assert tensor is None
                continue
            assert tensor.dtype == expect.dtype and tensor.shape == expect.shape, name
            assert torch.equal(tensor, expect), f"{row.id}: {name}"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A folder of rows in three shards or so."""
    writer.write_rows(tmp_path, made_up(), torch.float32, shard_bytes=1_500)
    return tmp_path


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


# --- what goes in comes out -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard_bytes", [1, 1_500, 10**9])
def test_rows_come_back_in_their_order(tmp_path: Path, dtype: torch.dtype, shard_bytes: int) -> None:
    """Bit for bit in float32; in 16 bits as the cast made them, given back as float32."""
    rows = made_up()
    assert writer.write_rows(tmp_path, iter(rows), dtype, shard_bytes) == len(rows)
    cast = [replace(r, features=r.features.to(dtype).float(), last=r.last.to(dtype).float()) for r in rows]
    assert_same(list(reader.read_rows(tmp_path)), cast)
    if shard_bytes == 1:
        assert len(shards(tmp_path)) == len(rows)
    elif shard_bytes == 10**9:
        assert len(shards(tmp_path)) == 1
    else:
        assert 1 < len(shards(tmp_path)) < len(rows)


def test_heads_are_read_without_their_hidden_states(written: Path) -> None:
    """Token ids and masks as `read` gives them, also where the hidden states beside them are broken."""
    expected = made_up()

    def check() -> None:
        heads = list(reader.read_headers(written))
        assert [h.id for h in heads] == [r.id for r in expected]
        for head, row in zip(heads, expected, strict=True):
            assert torch.equal(head.ids, row.ids) and torch.equal(head.mask, row.mask)
            assert (head.prompt_length, head.finish_reason) == (row.prompt_length, row.finish_reason)

    check()
    for path in shards(written):
        whole = bytearray(path.read_bytes())
        header = 8 + int.from_bytes(whole[:8], "little")
        whole[header + json.loads(whole[8:header])["features"]["data_offsets"][0]] ^= 1
        path.write_bytes(whole)
    check()
    shards(written)[1].unlink()
    with pytest.raises(
        ValueError, match=r"shard-00001.safetensors is missing or cut .* dvc repro -f -s extract_hiddens"
    ):
        list(reader.read_headers(written))


def test_fp8_rows_come_back_within_its_error(tmp_path: Path) -> None:
    """As `encode` made them, to the bit; and each part of a token by its own scale, as the parts differ by far."""
    rows = made_up()
    for row in rows:
        row.features[:, :H] *= 1e-4
        row.features[:, 2 * H :] *= 1e4
    assert writer.write_rows(tmp_path, iter(rows), format.FP8, 300) == len(rows)
    for row, was in zip(reader.read_rows(tmp_path), rows, strict=True):
        assert torch.equal(row.last, format.decode_numbers(*format.encode_numbers(was.last, format.FP8)))
        for part in range(3):
            columns = slice(part * H, (part + 1) * H)
            within_the_bound(row.features[:, columns], was.features[:, columns])
        within_the_bound(row.last, was.last)
        assert torch.equal(row.ids, was.ids) and torch.equal(row.mask, was.mask)
    assert len(shards(tmp_path)) > 1


def within_the_bound(found: torch.Tensor, true: torch.Tensor) -> None:
    """e4m3 has three bits after the point: half a step is 1/16; below 2**-6 steps are 2**-9. A hair for the division."""
    scale = true.abs().amax(-1, keepdim=True) / 448
    assert ((found - true).abs() <= torch.maximum(true.abs() / 16, scale / 1024) * (1 + 1e-6)).all()


@given(st.lists(st.floats(-1e30, 1e30), min_size=4, max_size=4), st.sampled_from([1e-30, 1e-6, 1.0, 1e6]))
@example([0.0, -0.0, 0.0, 0.0], 1.0)
@example([1e-45, 0.0, -1e-45, 0.0], 1.0)
@example([448.0, 447.9, -448.0, 1e-3], 1.0)
def test_any_number_in_fp8_is_within_its_error(numbers: list[float], factor: float) -> None:
    true = torch.tensor([numbers]) * factor
    stored, scale = format.encode_numbers(true, format.FP8)
    assert stored.dtype == torch.float8_e4m3fn and scale is not None and scale.shape == (1, 1)
    found = format.decode_numbers(stored, scale)
    assert torch.isfinite(found).all()
    tiny = torch.tensor(torch.finfo(torch.float32).tiny)  # no scale is below it
    bound = torch.maximum(torch.maximum(true.abs() / 16, scale / 1024), tiny) * (1 + 1e-6)
    assert ((found - true).abs() <= bound).all()


@pytest.mark.parametrize("dtype", list(format.DTYPES.values()))
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_rows_are_read_in_the_dtype_of_the_computation(
    tmp_path: Path, dtype: torch.dtype, compute: torch.dtype
) -> None:
    writer.write_rows(tmp_path, made_up(), dtype, 10**9)
    for row, plain in zip(reader.read_rows(tmp_path, compute), reader.read_rows(tmp_path), strict=True):
        assert row.features.dtype == row.last.dtype == compute
        assert torch.equal(row.features, plain.features.to(compute)) and torch.equal(row.last, plain.last.to(compute))


# --- of a target that sees -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, format.FP8])
@pytest.mark.parametrize("shard_bytes", [1, 1_500, 10**9])
def test_rows_with_pictures_come_back(tmp_path: Path, dtype: torch.dtype, shard_bytes: int) -> None:
    """By both readers: in order, and at random."""
    rows = seen()
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
    rows = seen()
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
    writer.write_rows(tmp_path, seen(), dtype, 10**9)
    tokens, pieces = sum(LENGTHS), sum(PICTURES)
    by_hand = tokens * (4 * H * itemsize + 4 * scale + 4 + 12) + 2 * -(-tokens // 8) + pieces * (H * itemsize + scale)
    assert by_hand <= shards(tmp_path)[0].stat().st_size <= by_hand + 960  # the header names seven tensors, or ten
    said = tokens * format.count_token_bytes(3, H, dtype, is_multimodal=True) + pieces * format.count_visual_bytes(
        H, dtype
    )
    assert said == pytest.approx(by_hand, abs=2)


def test_any_flipped_bit_of_pictures_is_refused(tmp_path: Path) -> None:
    rows = [replace(seen()[0]), replace(seen()[2])]
    writer.write_rows(tmp_path, rows, torch.float32, 10**9)
    place = shards(tmp_path)[0]
    whole = place.read_bytes()
    unused = {len(whole) - 1 - n * 3 for n in (0, 1)}  # 21 tokens: bits 2 to 0 of the last byte of both masks
    header = 8 + int.from_bytes(whole[:8], "little")
    # Every byte of the header, and of the numbers enough to be in each tensor; the test below has them all.
    for byte in (*range(header), *range(header, len(whole), 7), *sorted(unused)):
        spoilt = bytearray(whole)
        spoilt[byte] ^= 1 << (byte % 3 if byte in unused else byte % 8)
        place.write_bytes(spoilt)
        if byte in unused:
            assert_same(list(reader.read_rows(tmp_path)), rows)
        else:
            assert str(place) in refused(tmp_path), f"byte {byte}"


@pytest.mark.parametrize("column", ["visual_offset", "visual_length"])
@pytest.mark.parametrize("by", [1, -1, 100])
def test_an_index_that_misplaces_pictures_is_refused(tmp_path: Path, column: str, by: int) -> None:
    writer.write_rows(tmp_path, seen(), torch.float32, 10**9)
    place = tmp_path / "index.parquet"
    pl.read_parquet(place).with_columns(pl.col(column) + by).write_parquet(place)
    assert "does not match its checksum" in refused(tmp_path)


@pytest.mark.parametrize("sees", [True, False])
def test_an_index_of_the_other_kind_of_target_is_refused(tmp_path: Path, sees: bool) -> None:
    writer.write_rows(tmp_path, seen() if sees else made_up(), torch.float32, 10**9)
    place = tmp_path / "index.parquet"
    index = pl.read_parquet(place)
    if sees:
        index = index.drop("visual_offset", "visual_length")
    else:
        index = index.with_columns(visual_offset=pl.lit(0, pl.Int64), visual_length=pl.lit(0, pl.Int64))
    index.write_parquet(place)
    assert "does not match its checksum" in refused(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_picture_with_nan_is_refused_by_its_row(tmp_path: Path, dtype: torch.dtype) -> None:
    rows = seen()
    assert rows[3].image_embeddings is not None
    rows[3].image_embeddings[8, 1] = float("nan")
    writer.write_rows(tmp_path, rows, dtype, 10**9)
    assert "row w.3 holds NaN or infinity" in refused(tmp_path)


def test_safetensors_reads_our_shards(tmp_path: Path) -> None:
    """The file is written by us, in place, and its header must be theirs."""
    writer.write_rows(tmp_path, made_up(), format.FP8, 10**9)
    tokens = sum(LENGTHS)
    assert {name: (tuple(t.shape), t.dtype) for name, t in load_file(shards(tmp_path)[0]).items()} == {
        "features": ((tokens, 3 * H), torch.float8_e4m3fn), "features_scale": ((tokens, 3), torch.float32),
        "last": ((tokens, H), torch.float8_e4m3fn), "last_scale": ((tokens, 1), torch.float32),
        "ids": ((tokens,), torch.int32), "mask": ((-(-tokens // 8),), torch.uint8),
    }  # fmt: skip


@pytest.mark.parametrize("lengths", [[5, 1, 16, 9], [100], [], [1] * 7])
@pytest.mark.parametrize("size", [1, 10, 17, 1000])
def test_a_plan_holds_every_row_once_in_order(lengths: list[int], size: int) -> None:
    spans = shard_plan.plan_shards(lengths, [0] * len(lengths), 1.0, 0, size)
    assert [i for span in spans for i in span] == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in span) >= size for span in spans[:-1])
    assert all(sum(lengths[i] for i in span[:-1]) < size for span in spans)


def test_a_shard_may_be_put_in_any_order_by_threads(tmp_path: Path) -> None:
    """As extract_hiddens does; it is the very file that is written row by row."""
    (tmp_path / "plain").mkdir()
    rows = made_up()
    writer.write_rows(tmp_path / "plain", rows, torch.bfloat16, 10**9)
    shard = writer.ShardWriter(
        tmp_path / shard_plan.name_shard(0), rows, shard_plan.StoredRowSize(3, H, torch.bfloat16)
    )
    with ThreadPoolExecutor(3) as pool:
        for first, end in ((4, 6), (0, 3), (3, 4)):
            features, last = (
                torch.cat([getattr(r, name) for r in rows[first:end]]).bfloat16() for name in ("features", "last")
            )
            block = format.StoredHiddenStates(features, last)
            shard.write_block(first, end - first, block, format.find_finite_tokens(block), pool.map)
    assert not (tmp_path / shard_plan.name_shard(0)).exists()
    entries = shard.commit()
    assert (tmp_path / shard_plan.name_shard(0)).read_bytes() == shards(tmp_path / "plain")[0].read_bytes()
    records = [entry.to_record() for entry in entries]
    assert records == pl.read_parquet(tmp_path / "plain/index.parquet").to_dicts()


def test_no_rows_is_an_answer_too(tmp_path: Path) -> None:
    """The split at the sampling temperature has none where that is 0."""
    assert writer.write_rows(tmp_path, [], torch.float32, 10**9) == 0
    assert list(reader.read_rows(tmp_path)) == [] and shards(tmp_path) == []
    assert len(reader.digest_folder(tmp_path)) == 8


@pytest.mark.parametrize(
    ("dtype", "itemsize", "scales"), [(torch.float32, 4, 0), (torch.bfloat16, 2, 0), (torch.float8_e4m3fn, 1, 16)]
)
def test_a_token_takes_what_is_said_and_no_padding(
    tmp_path: Path, dtype: torch.dtype, itemsize: int, scales: int
) -> None:
    """4H numbers, an int32 and a bit; rivals pad each row to its batch's longest, 3.7 to 4.4 times as much."""
    writer.write_rows(tmp_path, made_up(), dtype, 10**9)
    tokens = sum(LENGTHS)
    by_hand = tokens * (4 * H * itemsize + scales + 4) + -(-tokens // 8)
    size = shards(tmp_path)[0].stat().st_size
    assert by_hand <= size <= by_hand + 640  # the header names four tensors, or six
    assert format.count_token_bytes(3, H, dtype) * tokens == pytest.approx(by_hand, abs=1)


def test_a_llama_8b_token_in_bfloat16_takes_32_8_kb() -> None:
    """The module's own docstring says so; a rival stores 32 784, with its int64 (research/specforge.md 3.3)."""
    assert format.count_token_bytes(3, 4096, torch.bfloat16) == 32_772.125
    assert format.count_token_bytes(3, 4096, format.FP8) == 16_404.125


def test_shards_are_about_as_large_as_asked(tmp_path: Path) -> None:
    """Closed by the row that fills it: never below, except for the last, and above by less than a row."""
    asked = 1_500
    writer.write_rows(tmp_path, made_up(), torch.float32, asked)
    tokens = dict(pl.read_parquet(tmp_path / "index.parquet").group_by("shard").agg(pl.col("length").sum()).iter_rows())
    for place in shards(tmp_path)[:-1]:
        size = tokens[place.name] * (4 * H * 4 + 4 + 1 / 8)
        assert asked <= size < asked + max(LENGTHS) * (4 * H * 4 + 5)


def test_the_mask_is_one_bit_a_token_first_token_highest(tmp_path: Path) -> None:
    """Read without our reader: eleven tokens are two bytes, and rows follow each other within a byte."""
    rows = made_up((3, 8))
    rows[0] = replace(rows[0], mask=torch.tensor([1, 0, 1]).bool())
    rows[1] = replace(rows[1], mask=torch.tensor([1, 1, 0, 0, 1, 0, 0, 1]).bool())
    writer.write_rows(tmp_path, rows, torch.float32, 10**9)
    with safe_open(shards(tmp_path)[0], framework="pt") as shard:
        assert shard.get_tensor("mask").tolist() == [0b10111001, 0b00100000]
        assert shard.get_tensor("ids").tolist() == rows[0].ids.tolist() + rows[1].ids.tolist()
        assert torch.equal(shard.get_tensor("features")[3:], rows[1].features)
    assert_same(list(reader.read_rows(tmp_path)), rows)


# --- what is altered is refused, by name ----------------------------------------------------------------------------


def refused(folder: Path) -> str:
    """The one message of a refused read; it says which stage to run."""
    with pytest.raises(Broken, match=r"run: dvc repro (-f -s )?extract_hiddens") as error:
        list(reader.read_rows(folder))
    assert str(folder) in str(error.value)
    return str(error.value)


def test_any_flipped_bit_of_a_shard_is_refused(tmp_path: Path) -> None:
    """One bit in every byte, header and numbers; only bits past the last token's mask mean nothing."""
    rows = made_up((2, 3))
    writer.write_rows(tmp_path, rows, torch.float32, 10**9)
    place = shards(tmp_path)[0]
    whole = place.read_bytes()
    for byte in range(len(whole)):
        spoilt = bytearray(whole)
        spoilt[byte] ^= 1 << byte % 3
        place.write_bytes(spoilt)
        if byte == len(whole) - 1:  # tokens 0 to 4 have the mask's bits 7 to 3: a lower one means nothing
            assert_same(list(reader.read_rows(tmp_path)), rows)
        else:
            assert str(place) in refused(tmp_path), f"byte {byte}"


def test_the_row_with_the_flipped_bit_is_named(written: Path) -> None:
    place = shards(written)[0]
    spoilt = bytearray(place.read_bytes())
    with safe_open(place, framework="pt") as shard:
        first = shard.get_tensor("features")[0, 0].numpy().tobytes()
    spoilt[spoilt.index(first)] ^= 1
    place.write_bytes(spoilt)
    assert f"{place}: row z.0 does not match its checksum" in refused(written)


@pytest.mark.parametrize("left", [0, 7, 100, -1], ids=["nothing", "half a length", "half a header", "a byte short"])
def test_a_cut_shard_is_refused(written: Path, left: int) -> None:
    place = shards(written)[1]
    place.write_bytes(place.read_bytes()[:left])
    assert re.search(
        r"shard-00001\.safetensors is missing or cut \(.+\); run: dvc repro -f -s extract_hiddens$", refused(written)
    )


def test_a_missing_shard_is_refused(written: Path) -> None:
    shards(written)[1].unlink()
    assert "shard-00001.safetensors is missing or cut" in refused(written)


def test_swapped_shards_are_refused(written: Path) -> None:
    first, second = shards(written)[:2]
    whole = first.read_bytes()
    shutil.copy(second, first)
    second.write_bytes(whole)
    assert "shard-00000.safetensors: row" in refused(written)


def test_rows_of_whole_shards_come_before_the_broken_one_stops_the_read(written: Path) -> None:
    """Checked as they are read, a shard at a time: nothing waits for the whole, and nothing broken gets out."""
    shards(written)[1].unlink()
    in_first = (
        pl.read_parquet(written / "index.parquet").filter(pl.col("shard") == "shard-00000.safetensors")["id"].to_list()
    )
    rows, found = reader.read_rows(written), []
    with pytest.raises(ValueError, match=r"shard-00001\.safetensors is missing"):
        found.extend(row.id for row in rows)  # keeps what came before the error
    assert found == in_first == [row.id for row in made_up()][: len(in_first)] != []


READS: list[Callable[[Path], object]] = [lambda folder: list(reader.read_rows(folder)), reader.digest_folder]
by_every_reader = pytest.mark.parametrize("reads", READS, ids=["read", "digest"])


@by_every_reader
def test_a_missing_index_is_refused(written: Path, reads: Callable[[Path], object]) -> None:
    """Bug: `digest`, which train_draft asks first, ended in a traceback."""
    (written / "index.parquet").unlink()
    with pytest.raises(ValueError, match=r"index\.parquet not found; run: dvc repro extract_hiddens$"):
        reads(written)


@by_every_reader
@pytest.mark.parametrize("left", [0, 100, -1])
def test_a_cut_index_is_refused(written: Path, reads: Callable[[Path], object], left: int) -> None:
    place = written / "index.parquet"
    place.write_bytes(place.read_bytes()[:left])
    with pytest.raises(
        ValueError, match=r"index\.parquet is not readable Parquet .*run: dvc repro -f -s extract_hiddens$"
    ):
        reads(written)


@by_every_reader
@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.drop("checksum"),
        lambda index: index.with_columns(pl.col("offset").cast(pl.Int32)),
        lambda index: index.with_columns(extra=1),
        lambda index: index.select(reversed(index.columns)),
    ],
    ids=["a column less", "another type", "a column more", "another order"],
)
def test_an_index_of_another_version_is_refused(
    written: Path, reads: Callable[[Path], object], change: Callable[[pl.DataFrame], pl.DataFrame]
) -> None:
    place = written / "index.parquet"
    change(pl.read_parquet(place)).write_parquet(place)
    with pytest.raises(
        ValueError, match=r"index\.parquet has columns .*expected .*run: dvc repro -f -s extract_hiddens$"
    ):
        reads(written)


def test_what_the_index_alone_says_of_a_row_is_checked_too(written: Path) -> None:
    """Bug: the checksum covered the tensors only; a flipped bit in prompt_length or the name was read as true."""
    place = written / "index.parquet"
    whole = pl.read_parquet(place)
    for change in (
        pl.col("id").str.replace("z", "a"),
        pl.col("prompt_length") + 1,
        pl.col("finish_reason").replace({"stop": "length"}),
        pl.col("offset") + 1,
        pl.col("length") - 1,
    ):
        whole.with_columns(change).write_parquet(place)
        assert "does not match its checksum" in refused(written)


# --- numbers that are none ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["features", "last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_row_with_nan_is_refused_by_name(tmp_path: Path, where: str, number: float, dtype: torch.dtype) -> None:
    rows = made_up()
    getattr(rows[3], where)[4, 2] = number
    writer.write_rows(tmp_path, rows, dtype, 10**9)
    assert pl.read_parquet(tmp_path / "index.parquet")["finite"].to_list() == [True, True, True, False, True, True]
    message = refused(tmp_path)
    assert "row w.3 holds NaN or infinity, expected finite hidden states; set extract_hiddens.dtype" in message


def test_a_number_too_large_for_float16_is_infinity_on_disk_and_refused(tmp_path: Path) -> None:
    """Finite in the target, infinite after the cast: what was stored counts."""
    rows = made_up()
    rows[1].features[0, 0] = 70_000.0  # float16 ends at 65 504
    writer.write_rows(tmp_path, rows, torch.float16, 10**9)
    assert "row y.1 holds NaN or infinity" in refused(tmp_path)


# --- the name of the content ----------------------------------------------------------------------------------------


def test_the_digest_changes_with_any_content_and_only_then(tmp_path: Path) -> None:
    """A resumed training run takes up its scratch folder by this name."""

    def digest(rows: list[HiddenStatesRow], dtype: torch.dtype = torch.float32, shard_bytes: int = 10**9) -> str:
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        writer.write_rows(tmp_path, rows, dtype, shard_bytes)
        return reader.digest_folder(tmp_path)

    base = made_up()
    other = [
        digest([replace(base[0], **{name: change(getattr(base[0], name))}), *base[1:]])
        for name, change in {
            "id": lambda x: x + "a",
            "ids": lambda x: x + 1,
            "mask": lambda x: ~x,
            "features": lambda x: x * (1 + 1e-6),
            "last": lambda x: -x,
            "prompt_length": lambda x: x + 1,
            "finish_reason": lambda x: "length",
        }.items()
    ]
    other += [digest(base[:-1]), digest(base[::-1]), digest(base, torch.bfloat16)]
    assert digest(base) == digest(made_up()) and digest(base) not in other
    assert len(set(other)) == len(other)
