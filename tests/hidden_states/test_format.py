"""Hidden states come back as they went, take what they must on disk, and are named by their content."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stages.hidden_states import format, reader, writer
from stages.hidden_states.format import HiddenStatesRow
from tests.hidden_states.made_up_rows import LENGTHS, H, assert_same, made_up, shards


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard_bytes", [1, 1_500, 10**9])
def test_rows_come_back_in_their_order(tmp_path: Path, dtype: torch.dtype, shard_bytes: int) -> None:
    """Bit for bit in float32; in 16 bits as the cast made them, given back as float32."""
    rows = made_up()
    assert writer.write_rows(tmp_path, iter(rows), dtype, shard_bytes) == len(rows)
    cast = [replace(r, features=r.features.to(dtype).float(), last=r.last.to(dtype).float()) for r in rows]
    assert_same(list(reader.read_rows(tmp_path)), cast)
    assert (len(shards(tmp_path)) == 1) == (shard_bytes == 10**9)


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


def test_safetensors_reads_our_shards(tmp_path: Path) -> None:
    """The file is written by us, in place, and its header must be theirs."""
    writer.write_rows(tmp_path, made_up(), format.FP8, 10**9)
    tokens = sum(LENGTHS)
    assert {name: (tuple(t.shape), t.dtype) for name, t in load_file(shards(tmp_path)[0]).items()} == {
        "features": ((tokens, 3 * H), torch.float8_e4m3fn), "features_scale": ((tokens, 3), torch.float32),
        "last": ((tokens, H), torch.float8_e4m3fn), "last_scale": ((tokens, 1), torch.float32),
        "ids": ((tokens,), torch.int32), "mask": ((-(-tokens // 8),), torch.uint8),
    }  # fmt: skip


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
