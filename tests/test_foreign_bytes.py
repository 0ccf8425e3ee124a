"""Files of others, mutated: every reader takes what it gets, or refuses it by one line that names the file."""

import bz2
import copy
import csv
import gzip
import json
import lzma
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages import import_draft, init_draft, report
from stages.cells.cell import Cell
from stages.data import readers, row_cleaning
from stages.data.tables.table_schema import load_table_file
from stages.families.block.config import build_block_config
from stages.families.block.files import Files
from stages.families.eagle3 import checkpoint as eagle3_checkpoint
from stages.families.eagle3 import files as eagle3_files
from stages.hidden_states import reader, writer
from stages.params import target_files
from stages.params.families import BLOCKS, EAGLE3
from stages.params.schema import load_params, read_recipe
from stages.published.tables import read_publication
from stages.reporting import plots
from stages.runtime import atomic, guarded_yaml
from stages.telemetry.interruption import escape_controls
from tests.conftest import ROOT, edit_params
from tests.draft import eagle3_exports, published_blocks, test_published_block_formats
from tests.hidden_states.made_up_rows import made_up
from tests.torch_cells import timed_cell

Read = Callable[[], object]
Change = Callable[[Path, random.Random], None]
NAMES = ("", "x", "a\n\x1b[31mb", "../../x.safetensors", "/dev/zero")
DEEP: list[Any] = []
for _ in range(900):
    DEEP = [DEEP]
VALUES = (
    None, True, -1, 0, 1, 7, 1.5, 10**30, 1e300, 1e-300, "", "x", "9" * 5000, "\ud800", float("nan"), float("inf"), *NAMES, [],
    [None], [0.5, "x"], {}, {"rope_type": 3}, {"a": {"b": []}}, DEEP,
)  # fmt: skip
DTYPES = (
    torch.float16, torch.float64, torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64,
    torch.uint16,
)  # fmt: skip
ROWS = [{"messages": [{"role": role, "content": f"{n}?"} for role in ("user", "assistant")]} for n in range(12)]


def published_eagle3(folder: Path) -> Read:
    eagle3_exports.export(folder, {"fc_norm": True}, rope=eagle3_exports.LLAMA3)
    draft, tables = folder / "draft", (eagle3_exports.EMBEDDING, eagle3_exports.HEAD)
    return lambda: eagle3_files.Files(EAGLE3).read_published_folder(draft, eagle3_exports.TARGET, lambda: tables)


def published_block(folder: Path, method: str, form: str) -> Read:
    draft, embedding, head = test_published_block_formats.original(method)
    published_blocks.publish(folder, *getattr(published_blocks, form)(draft, test_published_block_formats.LAYERS))
    return lambda: test_published_block_formats.read(folder, (embedding, head))


def own_eagle3(folder: Path) -> Read:
    eagle3_exports.export(folder, {"sliding_window": 64, "qk_norm": True})
    return lambda: eagle3_checkpoint.ROOT_FILES.read_checked(folder, "train_draft@e003")


def own_block(folder: Path) -> Read:
    draft, *_ = test_published_block_formats.original("dspark")
    config = build_block_config(draft.config, test_published_block_formats.LAYERS, "float32")
    files = Files(BLOCKS["dflash"])
    files.write(folder, config, dict(draft.state_dict()))
    return lambda: files.read_checked(folder, "train_draft@d003")


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


class Hang(BaseException):
    """A read that did not end."""


def list_places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        yield from list_places(inner) if isinstance(inner, dict | list) else ()


def change_value(document: Any, choice: random.Random) -> Any:
    """Replace, drop, double or move one value."""
    if (
        not (places := list(list_places(document)) if isinstance(document, dict | list) else [])
        or choice.random() < 0.03
    ):
        return choice.choice(VALUES)
    container, key = choice.choice(places)
    other, there = choice.choice(places)
    match choice.randrange(6):
        case 0:
            del container[key]
        case 1:
            container[key] = copy.deepcopy(other[there])
        case 2:
            container[key] = [container[key]]
        case 3 if isinstance(container, dict):
            container[choice.choice(NAMES)] = container[key]
        case 3:
            container.insert(0, container[key])
        case _:
            container[key] = choice.choice(VALUES)
    return document


def change_json(path: Path, choice: random.Random) -> None:
    path.write_text(json.dumps(change_value(json.loads(path.read_bytes()), choice)))


def change_yaml(path: Path, choice: random.Random) -> None:
    path.write_text(json.dumps(change_value(guarded_yaml.read_yaml(path), choice), default=str))  # JSON is YAML


def change_tensor(path: Path, choice: random.Random) -> None:
    """Change the dtype, shape, numbers or name of a tensor, drop or add one."""
    tensors = load_file(path)
    name = choice.choice(sorted(tensors) or ["x"])
    tensor = tensors.pop(name, torch.ones(2, 2))
    new: list[Callable[[], Tensor]] = [
        lambda: tensor.to(choice.choice(DTYPES)), lambda: tensor.flatten(), lambda: tensor[None], lambda: tensor[:0],
        lambda: tensor.repeat(2, *[1] * (tensor.ndim - 1)), lambda: tensor * choice.choice((0, -1, torch.nan, 1e30)),
    ]  # fmt: skip
    name = choice.choice((name, name, name, *NAMES))
    if choice.random() < 0.9:
        tensors[name] = choice.choice(new)().contiguous() if tensor.ndim else tensor
    save_file({key: value.clone() for key, value in tensors.items()}, path)


def change_table(path: Path, choice: random.Random) -> None:
    """Drop, double, move, empty, retype or rename rows and columns of Parquet."""
    table = pl.read_parquet(path)
    row, column = choice.randrange(table.height), pl.col(choice.choice(table.columns))
    new: list[Callable[[], pl.DataFrame]] = [
        lambda: table[:row], lambda: table[row:], lambda: pl.concat([table, table[row : row + 1]]), lambda: table.reverse(),
        lambda: table.with_columns(column.reverse()), lambda: table.with_columns(pl.lit(None).alias("x")),
        lambda: table.with_columns(column.cast(choice.choice((pl.String, pl.Int32, pl.Float64)), strict=False)),
        lambda: table.with_columns(column.cast(pl.String).cast(pl.Categorical)), lambda: table.drop(table.columns[0]),
        lambda: table.rename({table.columns[0]: choice.choice(NAMES)}), lambda: table.with_columns(column.shift(1)),
    ]  # fmt: skip
    with suppress(pl.exceptions.PolarsError):  # a list is cast to no number
        choice.choice(new)().write_parquet(path)


def change_cell(path: Path, choice: random.Random) -> None:
    """Change a cell of CSV, or drop or double a row."""
    rows = list(csv.reader(path.read_text().splitlines()))
    row = choice.choice(rows)
    row[choice.randrange(len(row))] = choice.choice((*NAMES, *map(str, VALUES[:12]), "nan", "inf", "1e999"))
    rows = choice.choice((rows, rows, rows[1:], [*rows, row, row[1:]], rows[:1]))
    path.write_text("\n".join(",".join(f'"{cell}"' for cell in row) for row in rows), errors="replace")


def change_bytes(path: Path, choice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    at = choice.randrange(len(data) + 1)
    data[at : at + choice.choice((0, 1, 1, 8, 10**9))] = choice.randbytes(choice.choice((0, 1, 1, 8)))
    path.write_bytes(data)


def replace_file(path: Path, choice: random.Random) -> None:
    """Put a folder, a pipe, a link, another file or nothing in the place of a file."""
    path.unlink()
    match choice.randrange(8):
        case 0:
            path.mkdir()
        case 1:
            os.mkfifo(path)
        case 2:
            path.symlink_to("/dev/zero")
        case 3:
            path.symlink_to(path)
        case 4:
            path.symlink_to(path.with_name("absent"))
        case 5:
            path.write_bytes(b"")
        case 6:
            path.write_bytes(
                choice.choice(
                    [file for file in sorted(path.parent.iterdir()) if file.is_file()] or [Path(__file__)]
                ).read_bytes()
            )


CHANGES: dict[str, Change] = {
    ".json": change_json, ".yaml": change_yaml, ".safetensors": change_tensor, ".parquet": change_table, ".csv": change_cell,
}  # fmt: skip


def mutate(path: Path, choice: random.Random) -> None:
    """Change what a file means where its format is known, else its bytes, or what kind of file it is."""
    chance = choice.random()
    change = replace_file if chance < 0.1 else change_bytes if chance < 0.25 else CHANGES.get(path.suffix, change_bytes)
    change(path, choice)


def run_within(seconds: int, do: Callable[[], object]) -> None:
    def stop(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        do()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check_mutants(folder: Path, names: list[str], do: Callable[[], object], choice: random.Random, count: int) -> None:
    """Do the same with one file after the other of a folder mutated: it goes well, or ends in one line that names a file."""
    whole = {name: (folder / name).read_bytes() for name in names}
    do()
    for _ in range(count):
        path = folder / choice.choice(names)
        mutate(path, choice)
        try:
            run_within(20, do)
        except ValueError as error:
            words, kind = escape_controls(str(error)).split(" problem(s) to correct:")[0], type(error).__name__
            is_told = "\n" not in words and any(Path(name).name in words for name in names)
            assert is_told and kind in ("ValueError", "BrokenArtifactError"), f"{path}: {kind}: {words}"
        atomic._remove_path(path)
        path.write_bytes(whole[str(path.relative_to(folder))])


@pytest.mark.parametrize("count", [25, pytest.param(500, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", READERS)
def test_a_mutated_file_is_read_or_refused_by_one_line(name: str, count: int, tmp_path: Path, monkeypatch) -> None:
    """Bug: 52 of 400 mutants of published drafts' configs ended in a traceback; a pipe in a file's place was waited for."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "theirs"
    folder.mkdir()
    read = READERS[name](folder)
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    check_mutants(folder, names, read, random.Random(name), count)


# A stage -> its main, the files that it reads, and how many mutants of them are tried.
STAGES: dict[str, tuple[Callable[[], None], tuple[str, ...], int]] = {
    "import_draft": (lambda: import_draft.main("theirs"), ("theirs/*",), 20),
    "init_draft": (init_draft.main, ("theirs/*", "data/hiddens/train/*", "data/hiddens/eval/*"), 10),
    "report": (report.main, ("results/*_report.json", *(f"results/{x}/*" for x in ("cells/*", "cost", "replay", "train"))), 10),
}  # fmt: skip


@pytest.mark.parametrize("times", [1, pytest.param(40, marks=pytest.mark.long)])
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_takes_mutated_inputs_or_refuses_them_by_one_line(
    stage: str, times: int, small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a report of fix_data with a zero in place of a table, or an unknown number in a cell, ended in a traceback."""
    main, patterns, count = STAGES[stage]
    root = tmp_path / "project"
    shutil.copytree(small_run, root, ignore=shutil.ignore_patterns(".dvc", ".git", "docs", "stages", "tests"))
    shutil.copytree(root / "drafts/e003/draft", root / "theirs")
    given = {"model": "theirs", "revision": None, "rope_theta": None}
    edit_params(root, {"import_draft": {"checkpoints": {"theirs": given}}} if stage == "import_draft" else {})
    edit_params(root, {"init_draft": {"from": "theirs"}} if stage == "init_draft" else {})
    monkeypatch.chdir(root)
    monkeypatch.setattr(plots, "render_svg", lambda *_: "")  # most of the report's time
    names = sorted(str(file.relative_to(root)) for pattern in patterns for file in root.glob(pattern))
    check_mutants(root, names, main, random.Random(stage), count * times)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_published_draft_whose_links_or_index_lead_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    """Bug: an index that named ../private.safetensors had that file imported, and so did a link."""
    read, draft = published_eagle3(tmp_path), tmp_path / "draft"
    private = (draft / name).rename(tmp_path / f"private.{name.split('.')[1]}")
    (draft / name).symlink_to(private)
    with pytest.raises(
        ValueError, match=rf"{name} is outside of its folder, expected no link to elsewhere; copy the file there"
    ):
        read()
    (draft / name).unlink()
    shutil.copy(private, draft / name)
    for elsewhere in (f"../{private.name}", str(private)):
        (draft / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": elsewhere}}))
        with pytest.raises(
            ValueError, match=r"index\.json names .*, expected safetensors files beside it; get the draft again"
        ):
            read()


@pytest.mark.parametrize(
    "read",
    [target_files.check_file_kinds, lambda folder: read_recipe(folder / "config.json")],
    ids=["target", "recipe"],
)
def test_a_private_file_that_is_linked_to_is_not_read(read: Callable[[Path], object], tmp_path: Path) -> None:
    """Bug: the first keys of a private file were shown, and its text became the chat template of the target's manifest."""
    (tmp_path / "private").write_text('{"secret": 1}')
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/config.json").symlink_to(tmp_path / "private")
    with pytest.raises(ValueError, match=r"config\.json is outside of its folder") as error:
        read(tmp_path / "theirs")
    assert "secret" not in str(error.value)
