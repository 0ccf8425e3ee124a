"""Raw files of every kind and folders of them, in one process or several: the same rows."""

import gzip
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stages import fix_data
from stages.data import readers
from tests.fix_data.raw_rows import outcome, pairs, row, set_lines, write_raw


def test_a_folder_of_every_format_gives_the_same_as_one_file(home: Path) -> None:
    """Four formats in four kinds of files: each is detected by its keys and counted."""
    folder = Path("data/mixed")
    folder.mkdir()
    rows = pairs(160)

    def turns(r: dict[str, Any]) -> list[dict[str, str]]:
        return [{"role": "user", "content": r["prompt"]}, {"role": "assistant", "content": r["answer"]}]

    first, second, third, fourth = (rows[i : i + 40] for i in range(0, 160, 40))
    with gzip.open(folder / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row(r["prompt"], r["answer"], system=None, id=r["id"])) + "\n" for r in first)
    (folder / "b.json").write_text(json.dumps([{"messages": turns(r), "prompt_id": r["id"]} for r in second]))
    pl.DataFrame([{"id": r["id"], "messages": turns(r)} for r in third]).write_parquet(folder / "c.parquet")
    (folder / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in fourth))
    set_lines(raw="data/mixed")
    train, evaluation, report = outcome()
    assert report["formats"] == {"messages": 40, "prompt_answer": 40, "sharegpt": 40, "ultrachat": 40}
    kept = {i: m for table in (train, evaluation) for i, m in table.select("id", "messages").iter_rows()}
    assert kept == {r["id"]: turns(r) for r in rows}
    assert set(pl.concat([train, evaluation])["source"]) == {"a.jsonl.gz", "b.json", "c.parquet", "d.jsonl"}


def test_one_process_or_several_and_chunks_of_any_size_make_the_same_bytes(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = pairs(300)
    rows += [{**r, "id": "again"} for r in rows[::40]] + [{"text": "?"}] * 5
    rows += [{**r, "answer": r["answer"][:-9] + "different"} for r in rows[5:300:30]]
    write_raw(rows)
    set_lines()
    outcomes = []
    for size, processors in ((1 << 22, 2), (20_000, 2), (20_000, 1), (3_000, 1)):
        monkeypatch.setattr(readers, "CHUNK_BYTES", size)
        monkeypatch.setattr(fix_data.os, "sched_getaffinity", lambda _, n=processors: set(range(n)))
        _, _, report = outcome()
        assert report["dropped_reasons"]["duplicate"] == 8 and report["dropped_reasons"]["unknown_format"] == 5
        timeless = {k: v for k, v in report.items() if k not in ("seconds", "rows_per_second")}
        outcomes.append((fix_data.TRAIN_FILE.read_bytes(), fix_data.EVAL_FILE.read_bytes(), timeless))
    assert all(other == outcomes[0] for other in outcomes[1:])
    assert not fix_data.WAITING_FOLDER.exists()


def test_a_history_in_a_cell_is_read_as_json(home: Path) -> None:
    """Bug: the text was taken for a list of its characters, and every row with a history was dropped, of `[]` too."""
    rows = pairs(60)
    earlier = ['[["Hello","Hello, how can I help?"]]', "[]", None]
    table = pl.DataFrame([{**r, "history": earlier[n % 3]} for n, r in enumerate(rows)])
    table.write_csv("data/a.csv")
    set_lines(raw="data/a.csv")
    train, held_out, report = outcome()
    assert report["clean"] == 60
    lengths = [len(messages) for frame in (train, held_out) for messages in frame["messages"].to_list()]
    assert sorted(lengths) == [2] * 40 + [4] * 20
