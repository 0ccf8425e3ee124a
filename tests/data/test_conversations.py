"""Conversation tables survive a round trip; a table of another schema, missing or truncated, is refused by name."""

from pathlib import Path

import polars as pl
import pytest

from stages.data import conversations
from stages.data.conversations import FIXED_SCHEMA, SAMPLED_SCHEMA

FIXED_ROWS = [
    {
        "id": "q7",
        "messages": [
            {"role": "user", "content": "Zürich − 5°? 🌧"},
            {"role": "assistant", "content": "a: 1\n  b\t\r\n"},
        ],
        "tools": '[{"name": "forecast"}]',
        "tool_calls": [None, '[{"id": 1}]'],
        "reasoning": [None, "Zürich is cold."],
        "trained": [True, False],
        "images": ["data/raw/sky.png"],
        "source": "part/a.jsonl",
        "source_row": 6,
        "verdict": "repaired:fence,count",
    },
    {
        "id": "a",
        "messages": [],
        "tools": None,
        "tool_calls": None,
        "reasoning": None,
        "trained": None,
        "images": [],
        "source": "b.parquet",
        "source_row": 0,
        "verdict": "clean",
    },
]
SAMPLED_ROWS = [
    {
        "id": "q7.0", "prompt_ids": [1, 2**31 - 1], "answer_ids": [5], "finish_reason": "stop", "temperature": 0.5,
        "top_p": 0.75, "source_row": 6, "verdict": "clean", "images": ["data/raw/sky.png", "data/raw/sea.png"],
    },
    {
        "id": "a.1", "prompt_ids": [3], "answer_ids": [], "finish_reason": "length", "temperature": 0.0,
        "top_p": None, "source_row": 0, "verdict": "clean", "images": None,
    },
]  # fmt: skip
tables = pytest.mark.parametrize(
    ("rows", "schema"), [(FIXED_ROWS, FIXED_SCHEMA), (SAMPLED_ROWS, SAMPLED_SCHEMA), ([], FIXED_SCHEMA), ([], SAMPLED_SCHEMA)],
    ids=["fixed", "sampled", "no fixed", "no sampled"],
)  # fmt: skip


@tables
def test_a_table_survives_a_round_trip(tmp_path: Path, rows: list[dict], schema: pl.Schema) -> None:
    """Carriage returns, empty lists, order and types are preserved."""
    path = tmp_path / "data" / "train.parquet"
    conversations.write_table(path, pl.DataFrame(rows, schema=schema), schema)
    found = conversations.read_table(path, schema, "fix_data")
    assert found.to_dicts() == rows and found.schema == schema
    assert [p.name for p in path.parent.iterdir()] == ["train.parquet"]


@pytest.mark.parametrize(
    "change",
    [pl.col("source_row").cast(pl.Int64), pl.lit(1).alias("extra"), pl.col("prompt_ids").cast(pl.List(pl.Int64))],
    ids=["row number in 64 bits", "a column more", "token ids in 64 bits"],
)
def test_another_schema_is_neither_written_nor_read(tmp_path: Path, change: pl.Expr) -> None:
    path = tmp_path / "eval.parquet"
    rows = pl.DataFrame(SAMPLED_ROWS, schema=SAMPLED_SCHEMA).with_columns(change)
    with pytest.raises(AssertionError, match=r"eval\.parquet: .* is not "):
        conversations.write_table(path, rows, SAMPLED_SCHEMA)
    assert list(tmp_path.iterdir()) == []
    rows.write_parquet(path)
    with pytest.raises(
        ValueError, match=r"eval\.parquet has columns .*, expected .*; run: dvc repro -f -s sample_target$"
    ):
        conversations.read_table(path, SAMPLED_SCHEMA, "sample_target")


def test_a_folder_is_its_shards_in_order(tmp_path: Path) -> None:
    for number in range(3):
        rows = pl.DataFrame([row | {"id": f"{number}"} for row in SAMPLED_ROWS], schema=SAMPLED_SCHEMA)
        conversations.write_table(tmp_path / conversations.name_shard(number), rows, SAMPLED_SCHEMA)
    (tmp_path / "part-00001.parquet.tmp").touch()
    found = conversations.read_table(tmp_path, SAMPLED_SCHEMA, "sample_target")
    assert found["id"].to_list() == ["0", "0", "1", "1", "2", "2"]
    for most in range(8):
        assert conversations.read_table(tmp_path, SAMPLED_SCHEMA, "sample_target", most).equals(found.head(most))
    (tmp_path / "part-00001.parquet").unlink()
    with pytest.raises(
        ValueError, match=r"part-00001\.parquet not found among 2 shards; run: dvc repro sample_target$"
    ):
        conversations.read_table(tmp_path, SAMPLED_SCHEMA, "sample_target")
    for left in tmp_path.iterdir():
        left.unlink()
    with pytest.raises(ValueError, match=r"part-00000\.parquet not found among 0 shards"):
        conversations.read_table(tmp_path, SAMPLED_SCHEMA, "sample_target")
