"""Shards: rows set in any order make the same files; complete shards are published and found by a resumed run."""

import random
import shutil
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from stages.data import conversations
from stages.sampling.parquet_shards import ParquetShardWriter

SCHEMA = pl.Schema({"id": pl.Int64})


@dataclass(frozen=True)
class IdRow:
    """A row of SCHEMA."""

    id: int


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def open_writer(tmp_path: Path, total: int, size: int) -> closing[ParquetShardWriter]:
    return closing(ParquetShardWriter(tmp_path / "scratch", np.arange(total) // size, SCHEMA))


@pytest.mark.parametrize(("total", "size"), [(0, 3), (1, 3), (3, 3), (10, 3), (10, 1), (2, 100)])
def test_any_order_makes_the_same_files(tmp_path: Path, total: int, size: int) -> None:
    """Bug: rows numbered by completion were in another shard in every run."""
    for n in range(4):
        order = list(range(total))
        random.Random(n).shuffle(order)
        with open_writer(tmp_path / str(n), total, size) as rows:
            for position in order:
                rows.set_row(position, IdRow(position), {"rows": 1})
            rows.finish()
            assert rows.oldest == rows.num_shards
            rows.publish(tmp_path / f"out{n}")
        folder = tmp_path / f"out{n}"
        assert names(folder) == [f"part-{k:05d}.parquet" for k in range(max(1, -(-total // size)))]
        assert all((folder / f).read_bytes() == (tmp_path / "out0" / f).read_bytes() for f in names(folder))
        assert conversations.read_table(folder, SCHEMA, "sample_target")["id"].to_list() == list(range(total))
        assert rows.counts["rows"] == total
        assert not list((tmp_path / str(n)).rglob("*.jsonl"))


def test_a_shard_is_published_when_its_last_row_is_set_and_not_before(tmp_path: Path) -> None:
    with open_writer(tmp_path, 7, 3) as rows:
        for position in (4, 0, 2):
            rows.set_row(position, IdRow(position), {})
        assert rows.published == set() and rows.oldest == 0
        rows.set_row(1, None, {"dropped/empty": 1})
        assert rows.published == {0} and rows.oldest == 1
        part = tmp_path / "scratch/parts/part-00000.parquet"
        assert pl.read_parquet(part)["id"].to_list() == [0, 2]
        assert names(tmp_path / "scratch/journals") == ["00001.jsonl"]
        with pytest.raises(AssertionError, match="row 2 twice"):
            rows.set_row(2, IdRow(2), {})
        with pytest.raises(AssertionError, match="shard 1 lacks 2 rows"):
            rows.finish()
    with open_writer(tmp_path, 7, 3) as rows:
        assert rows.num_resumed == 4 and rows.is_set(1) and rows.is_set(4) and not rows.is_set(3)


@pytest.mark.parametrize("broken", ["parts/part-00000.parquet", "counts/00000.json"])
def test_broken_unfinished_work_names_its_folder_and_removing_it_helps(tmp_path: Path, broken: str) -> None:
    """Bug: the message advised to delete the counts alone; afterwards they were `not found` on every run."""
    with open_writer(tmp_path, 4, 2) as rows:
        for position in range(2):
            rows.set_row(position, IdRow(position), {"rows": 1})
    folder = tmp_path / "scratch"
    (folder / broken).write_bytes((folder / broken).read_bytes()[:-3])
    with pytest.raises(
        ValueError, match=rf"{broken} .*; remove the folder {folder}, which holds nothing else"
    ) as error:
        open_writer(tmp_path, 4, 2)
    assert "dvc repro" not in str(error.value)
    shutil.rmtree(folder)
    with open_writer(tmp_path, 4, 2) as rows:
        assert rows.num_resumed == 0
        for position in range(4):
            rows.set_row(position, IdRow(position), {"rows": 1})
        rows.finish()
        assert rows.counts["rows"] == 4
