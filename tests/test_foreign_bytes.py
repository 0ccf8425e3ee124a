"""Files of others, mutated: every reader takes what it gets, or refuses it by one line that names the file."""

import bz2
import gzip
import json
import lzma
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow
import pytest
import torch

from stages.cells.cell import Cell
from stages.data import readers, row_cleaning
from stages.data.tables.table_schema import load_table_file
from stages.draft import block_checkpoint, eagle3_checkpoint, published_eagle3_formats
from stages.hidden_states import reader, writer
from stages.params.schema import load_params, read_recipe
from stages.published.tables import read_publication
from tests.conftest import ROOT
from tests.draft import eagle3_exports, published_blocks, test_published_block_formats
from tests.hidden_states.made_up_rows import made_up
from tests.torch_cells import timed_cell

Read = Callable[[], object]
VALUES = (None, True, -1, 0, 1, 7, 1.5, 10**30, "", "x", "9" * 5000, "\ud800", [], [None], {}, {"rope_type": 3})
ROWS = [{"messages": [{"role": role, "content": f"{n}?"} for role in ("user", "assistant")]} for n in range(12)]


def published_eagle3(folder: Path) -> Read:
    eagle3_exports.export(folder, {"fc_norm": True}, rope=eagle3_exports.LLAMA3)
    draft, tables = folder / "draft", (eagle3_exports.EMBEDDING, eagle3_exports.HEAD)
    return lambda: published_eagle3_formats.read_published_draft(draft, eagle3_exports.TARGET, lambda: tables)


def published_block(folder: Path, method: str, form: str) -> Read:
    draft, embedding, head = test_published_block_formats.original(method)
    published_blocks.publish(folder, *getattr(published_blocks, form)(draft, test_published_block_formats.LAYERS))
    return lambda: test_published_block_formats.read(folder, (embedding, head))


def own_eagle3(folder: Path) -> Read:
    eagle3_exports.export(folder, {"sliding_window": 64, "qk_norm": True})
    return lambda: eagle3_checkpoint.read_eagle3_draft(folder, "train_draft@e003")


def own_block(folder: Path) -> Read:
    draft, *_ = test_published_block_formats.original("dspark")
    config = block_checkpoint.build_block_config(draft.config, test_published_block_formats.LAYERS, "float32")
    block_checkpoint.write_block_draft(folder, config, dict(draft.state_dict()))
    return lambda: block_checkpoint.read_block_draft(folder, "train_draft@d003")


def hidden_states(folder: Path) -> Read:
    writer.write_rows(folder, made_up((2, 3)), torch.float32, 10**9)
    return lambda: list(reader.read_rows(folder))


def result_record(folder: Path) -> Read:
    os.chdir(folder)
    timed_cell("t8_2_16", checkpoint="e003").write()
    return lambda: Cell.read("torch", "eval", "e003", "t8_2_16")


def raw_rows(folder: Path, name: str, compress: Callable[[bytes], bytes] = bytes) -> Read:
    path = folder / name
    if name.endswith(".parquet"):
        pl.DataFrame(ROWS).write_parquet(path)
    elif ".csv" in name:
        path.write_bytes(compress(b"prompt,answer\n" + b"q,a\n" * 12))
    else:
        text = json.dumps(ROWS) if name.endswith(".json") else "\n".join(map(json.dumps, ROWS))
        path.write_bytes(compress(text.encode()))
    params = load_params(ROOT / "params.yaml").fix_data.model_copy(update={"answers": "text"})
    judge = row_cleaning.judge_chunk
    return lambda: [judge(one, params, Path("one.arrow")) for one in readers.read_all_chunks(path, {})]


def copied(folder: Path, file: str, read: Callable[[Path], object]) -> Read:
    copy = shutil.copy(ROOT / file, folder / "theirs.yaml")
    return lambda: read(copy)


READERS: dict[str, Callable[[Path], Read]] = {
    "published eagle3": published_eagle3,
    "deepspec": lambda folder: published_block(folder, "dspark", "deepspec"),
    "z-lab": lambda folder: published_block(folder, "dflash", "z_lab"),
    "speculators": lambda folder: published_block(folder, "dflash", "speculators"),
    "own eagle3": own_eagle3, "own block": own_block, "hidden states": hidden_states, "cell": result_record,
    **{kind: lambda folder, kind=kind: raw_rows(folder, f"a.{kind}") for kind in ("jsonl", "json", "parquet", "csv")},
    "gz": lambda folder: raw_rows(folder, "a.jsonl.gz", gzip.compress),
    "bz2": lambda folder: raw_rows(folder, "a.jsonl.bz2", bz2.compress),
    "xz": lambda folder: raw_rows(folder, "a.csv.xz", lzma.compress),
    "zst": lambda folder: raw_rows(folder, "a.jsonl.zst", lambda data: pyarrow.compress(data, "zstd", asbytes=True)),
    "params": lambda folder: copied(folder, "params.yaml", load_params),
    "recipe": lambda folder: copied(folder, "recipes/angelslim-qwen3-8b.yaml", read_recipe),
    "tables": lambda folder: copied(folder, "data/tables/weather.yaml", load_table_file.__wrapped__),
    "publication": lambda folder: copied(folder, "published/eagle3-paper.yaml", read_publication),
}  # fmt: skip


def list_places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        yield from list_places(inner) if isinstance(inner, dict | list) else ()


def mutate(path: Path, choice: random.Random) -> None:
    """Replace or drop one value of a JSON file, or alter, cut or add bytes of any."""
    data = bytearray(path.read_bytes())
    if path.suffix == ".json" and choice.random() < 0.8:
        document = json.loads(data)
        container, key = choice.choice(list(list_places(document)))
        container[key] = choice.choice(VALUES)
        if choice.random() < 0.2:
            del container[key]
        path.write_text(json.dumps(document))
        return
    at = choice.randrange(len(data))
    data[at : at + choice.choice((0, 1, 1, 8, 10**9))] = choice.randbytes(choice.choice((0, 1, 1, 8)))
    path.write_bytes(data)


@pytest.mark.parametrize("count", [25, pytest.param(500, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", READERS)
def test_a_mutated_file_is_read_or_refused_by_one_line(name: str, count: int, tmp_path: Path, monkeypatch) -> None:
    """Bug: 52 of 400 mutants of published drafts' configs ended in a traceback."""
    monkeypatch.chdir(tmp_path)
    Path("theirs").mkdir()
    read, choice = READERS[name](tmp_path / "theirs"), random.Random(name)
    whole = shutil.copytree(tmp_path / "theirs", tmp_path / "whole")
    files = sorted(file.relative_to(whole) for file in whole.rglob("*") if file.is_file())
    for attempt in range(count + 1):
        try:
            read()
        except ValueError as error:
            words, known = str(error).split(" problem(s) to correct:")[0], (f"{tmp_path}/theirs", *map(str, files))
            is_told = "\n" not in words and any(file in words for file in known)
            assert attempt and is_told and type(error).__name__ in ("ValueError", "BrokenArtifactError"), words  # noqa: PT017
        shutil.copytree(whole, tmp_path / "theirs", dirs_exist_ok=True)
        mutate(tmp_path / "theirs" / choice.choice(files), choice)


def test_a_file_that_would_fill_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "FREE_BYTES", 0)
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(b"a" * 10**7))
    with pytest.raises(ValueError, match=r"a\.jsonl\.xz: expected at most 200 times its size when decompressed"):
        list(readers.read_all_chunks(tmp_path / "a.jsonl.xz", {}))
