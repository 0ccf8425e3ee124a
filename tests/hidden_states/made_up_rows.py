"""Rows of hidden states that could be true, with and without pictures, and the checks that tests of their files share."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stages.hidden_states import reader
from stages.hidden_states.format import HiddenStatesRow
from stages.runtime.atomic import BrokenArtifactError

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


def make_pictured_rows(pieces: tuple[int, ...] = PICTURES) -> list[HiddenStatesRow]:
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


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def read_refusal(folder: Path) -> str:
    """The one message of a refused read; it says which stage to run."""
    with pytest.raises(BrokenArtifactError, match=r"run: dvc repro (-f -s )?extract_hiddens") as error:
        list(reader.read_rows(folder))
    assert str(folder) in str(error.value)
    return str(error.value)
