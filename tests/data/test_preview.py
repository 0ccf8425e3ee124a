"""`aerie preview data` says of each row what fix_data then does with it."""

import json
from collections import Counter
from pathlib import Path

import polars as pl
import pytest

from stages import fix_data
from stages.data import conversations, preview, readers
from stages.params.schema import load_params
from tests.conftest import ROOT, edit_params

PNG = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose raw data is a folder with a file of each kind and rows of every fate."""
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text((ROOT / "params.yaml").read_text(encoding="utf-8"))
    edit_params(tmp_path, {"fix_data": {"raw": "raw", "answers": "text", "eval_share": 0.5}})
    Path("raw").mkdir()
    rows = [{"id": f"a{n}", "prompt": f"q{n}", "answer": "yes"} for n in range(6)]
    Path("raw/a.csv").write_text("id,prompt,answer\n" + "".join(f"{','.join(row.values())}\n" for row in rows))
    turns = [
        {"from": "human", "value": "<image>\nWhat?"},
        {"from": "gpt", "value": "A\nsquare."},
        {"from": "human", "value": " "},
    ]
    lines = [{"id": "b0", "conversations": turns, "image": PNG}, {"id": "b1", "text": "x"}]
    Path("raw/b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines) + "\n")  # a blank line is no row
    pl.DataFrame(rows).with_columns(id=pl.col("id") + "p", prompt=pl.col("prompt") + "?").write_parquet("raw/c.parquet")
    return tmp_path


def test_each_row_becomes_what_the_stage_makes_of_it(home: Path) -> None:
    params = load_params().fix_data
    counts = Counter[str]()
    shown = list(preview.preview_rows(params, 100, counts))
    assert counts == {"a.csv": 6, "b.jsonl": 2, "c.parquet": 6}
    assert not Path(".scratch").exists() and not Path("data").exists()
    fix_data.main()
    made = {}
    for split, path in (("train", fix_data.TRAIN_FILE), ("eval", fix_data.EVAL_FILE)):
        for row in conversations.read_table(path, conversations.FIXED_SCHEMA, "fix_data").iter_rows(named=True):
            turns = [(message["role"], message["content"]) for message in row["messages"]]
            made[row["source"], row["source_row"]] = (split, row["verdict"], turns)
    kept = {(row.source, row.number): (row.split, row.verdict, row.turns) for row in shown if row.split}
    assert kept == made and len({split for split, _, _ in made.values()}) == 2
    dropped = [(row.source, row.number, row.verdict) for row in shown if not row.split]
    assert dropped == [("b.jsonl", 1, "dropped:unknown_format")]


def test_a_file_that_is_lost_whole_is_named_by_preview_and_stage(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: of a folder, a file of another kind or without a readable row was lost without a word."""
    Path("raw/d.jsonl").write_text('{"text": "x"}\n' * 4)
    Path("raw/notes.docx").touch()
    Path("raw/seen.png").touch()
    note = f"note: not read in raw: notes.docx; what can be read: {readers.ACCEPTED_FILES}"
    preview.main("1")
    printed = capsys.readouterr().out.splitlines()
    assert "rows of each file: a.csv 6, b.jsonl 2, c.parquet 6, d.jsonl 4" in printed and note in printed
    fix_data.main()
    printed = capsys.readouterr().out.splitlines()
    assert printed[:3] == [
        "note: no row of d.jsonl is kept: 4 rows, 4 unknown_format",
        note,
        "fix_data: rows kept of each file: a.csv 6 of 6, b.jsonl 1 of 2, c.parquet 6 of 6, d.jsonl 0 of 4",
    ]
