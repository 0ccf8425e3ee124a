"""A folder of hidden states that the user gave: what is broken in it is theirs to fix, and nothing of it to remove."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stages.hidden_states import format, importers, writer
from tests.hidden_states.made_up_rows import H, made_up, shards


def flip_byte(folder: Path) -> None:
    path = shards(folder)[0]
    spoilt = bytearray(path.read_bytes())
    spoilt[-100] ^= 1
    path.write_bytes(spoilt)


def cut_shard(folder: Path) -> None:
    path = shards(folder)[0]
    path.write_bytes(path.read_bytes()[:-9])


def remove_shard(folder: Path) -> None:
    shards(folder)[0].unlink()


def spoil_index(folder: Path) -> None:
    (folder / "index.parquet").write_bytes(b"PAR1 no more")


@pytest.mark.parametrize("spoil", [flip_byte, cut_shard, remove_shard, spoil_index])
def test_a_broken_import_is_not_said_to_be_removed(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    """Bug: a flipped bit in the user's own folder said `delete FOLDER and run: dvc repro extract_hiddens`."""
    rows = made_up()
    writer.write_rows(tmp_path, rows, torch.float32, 10**9)
    spoil(tmp_path)
    heads = {row.id: format.RowHeader(row.id, row.ids, row.mask, row.prompt_length, row.finish_reason) for row in rows}
    with pytest.raises(ValueError, match=r"^extract_hiddens\.import: ") as error:
        [
            given(head)
            for given in [importers.find_hidden_states(tmp_path, heads, [2, 3, 4], H)]
            for head in heads.values()
        ]
    message = str(error.value)
    assert not re.search(r"delete|remove|dvc repro", message)
    assert str(tmp_path) in message and "copy it again from where it was made" in message
