"""fix_data: raw conversations -> clean, repaired or dropped, split into train and eval.   python -m stages.fix_data

Reads `fix_data.raw` (stages/data/readers.py). Writes data/fixed/{train,eval}.parquet in source order, images named by their
content to data/fixed/images/, and results/fix_report.json. A line that is no JSON object, or not of the format that params.yaml
names, stops the stage; a broken conversation is dropped with a reason and counted; too many drops stop the stage.
Rows in = clean + repaired + dropped, asserted.

A million rows fit in memory: chunks are judged in parallel processes (row_cleaning.py), kept rows wait on disk as Arrow files,
and are assigned to a split by their digests alone. The waiting files are then filtered and
streamed into the two tables. The number of processes does not change the output.
"""

import multiprocessing
import os
import shutil
import signal
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Any

import polars as pl

from stages.data import chat_formats, conversations, readers, row_cleaning
from stages.data.conversations import describe_origin
from stages.data.hub_datasets import HubRecord
from stages.data.row_cleaning import (
    IMAGES_FOLDER,
    WAITING_FOLDER,
    WAITING_IMAGES_FOLDER,
    DroppedExample,
    JudgedChunk,
    RepairedAnswer,
    SplitFate,
)
from stages.data.tables.table_schema import load_table_file
from stages.params import stage_inputs
from stages.params.checks import check_raw
from stages.params.data_sections import FixData
from stages.params.schema import Params
from stages.params.units import list_first
from stages.runtime import atomic
from stages.telemetry.run_stage import run_stage

TRAIN_FILE, EVAL_FILE = Path("data/fixed/train.parquet"), Path("data/fixed/eval.parquet")
REPORT = Path("results/fix_report.json")
MAX_PROCESSES = 8  # about 200 MiB each: a Python and some chunks
MAX_LISTED_FILES = 8
JUDGED_COLUMNS = ["id", "source", "source_row", "verdict", "digest", "opening_digest", "is_eval"]  # held for all rows
IS_KEPT = pl.col("fate") <= int(SplitFate.EVAL)


def main() -> None:
    params = stage_inputs.read_params("fix_data")
    check_raw(params)
    if params.fix_data.tables is not None and params.fix_data.answers != "text":
        load_table_file(Path(params.fix_data.tables))
    _fix(params)


def _fix(params: Params) -> None:
    """Judge every row, assign the kept ones to train or eval, and write both tables and the report."""
    started = time.perf_counter()
    shutil.rmtree(WAITING_FOLDER, ignore_errors=True)  # left by a killed run
    WAITING_IMAGES_FOLDER.mkdir(parents=True)
    try:
        hub_records: dict[str, HubRecord] = {}
        chunks = list(judge_chunks(params.fix_data, hub_records))
        rows = scan_waiting_rows(chunks).select(JUDGED_COLUMNS).collect()
        assigned = rows.with_columns(fate=row_cleaning.assign_splits(rows))
        report = write_splits(chunks, assigned, params.fix_data)
        report["files"] = count_files(chunks, assigned, Path(params.fix_data.raw))
    finally:
        shutil.rmtree(WAITING_FOLDER, ignore_errors=True)
    seconds = time.perf_counter() - started
    report["hub"] = {source: asdict(record) for source, record in hub_records.items()}
    report |= {"rows_per_second": round(report["rows_in"] / seconds), "seconds": round(seconds, 3)}
    atomic.write_json(REPORT, report)
    if len(report["files"]) > 1:
        counts = (f"{name} {one['kept']:,} of {one['rows']:,}" for name, one in report["files"].items())
        print(f"fix_data: rows kept of each file: {list_first(counts, MAX_LISTED_FILES)}")
    reasons = sorted(report["dropped_reasons"].items(), key=lambda item: -item[1])
    named = (f"{reason} {count:,} (first {report['dropped_first'][reason]})" for reason, count in reasons)
    why = f": {list_first(named, MAX_LISTED_FILES)}" if reasons else ""
    print(
        f"fix_data: {report['rows_in']} rows = {report['clean']} clean + {report['repaired']} repaired + "
        f"{report['dropped']} dropped{why}; {report['train']} to train, {report['eval']} to eval"
    )
    if report["unread_keys"]:
        print(f"keys of rows that are not read: {row_cleaning.describe_unread(Counter(report['unread_keys']))}")


def judge_chunks(params: FixData, hub_records: dict[str, HubRecord]) -> Iterator[JudgedChunk]:
    """Yield the verdicts of each chunk, in order: a single chunk is judged in this process, several in a process pool."""
    chunks = readers.read_all_chunks(Path(params.raw), hub_records, params.is_eval_source, params.choose_columns)
    start = list(islice(chunks, 2))
    jobs = ((c, params, WAITING_FOLDER / f"{n:06}.arrow") for n, c in enumerate(chain(start, chunks)))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(MAX_PROCESSES, cores)
    if len(start) < 2 or workers < 2:
        yield from (row_cleaning.judge_chunk(*job) for job in jobs)
        return
    # spawn: a fork of a process in which polars has threads may hang.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        waiting: deque[Future[JudgedChunk]] = deque()
        try:
            for job in jobs:
                # Ctrl-C reaches all of a terminal's processes; those started here inherit that it is blocked, and end with this.
                signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
                waiting.append(pool.submit(row_cleaning.judge_chunk, *job))
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise ValueError(
                f"fix_data: one of {workers} processes was killed, expected each to have some 200 MiB of memory; free "
                "some, or give the stage fewer cores: taskset -c 0 python -m stages.fix_data"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def scan_waiting_rows(chunks: list[JudgedChunk]) -> pl.LazyFrame:
    """Return the kept rows of all chunks, in source order, as row_cleaning.WAITING_SCHEMA."""
    files = [chunk.file for chunk in chunks]
    return pl.scan_ipc(files) if files else pl.LazyFrame(schema=row_cleaning.WAITING_SCHEMA)


def write_splits(chunks: list[JudgedChunk], rows: pl.DataFrame, params: FixData) -> dict[str, Any]:
    """Stream the rows into their tables; return the counts of the report. `rows` are all waiting rows with their fates."""
    dropped, first_dropped = count_dropped(chunks, rows)
    rows_in, split = sum(chunk.rows_in for chunk in chunks), Counter(rows.filter(IS_KEPT)["fate"].to_list())
    if split.total():
        check_dropped(rows_in, dropped, first_dropped, params)
    check_split(split, dropped, first_dropped, params)
    _write_tables(chunks, rows)
    verdicts = rows.filter(IS_KEPT)["verdict"]
    rules = verdicts.filter(verdicts != "clean").str.strip_prefix("repaired:").str.split(",").explode().value_counts()
    examples: dict[str, RepairedAnswer] = {}
    for chunk in chunks:
        for answer in chunk.examples.values():
            row_cleaning.keep_plainest_examples(examples, answer)
    num_images = publish_images()

    clean = int((verdicts == "clean").sum())
    assert rows_in == len(verdicts) + dropped.total() and len(verdicts) == split.total(), (rows_in, split, dropped)
    return {
        "rows_in": rows_in,
        "clean": clean,
        "repaired": len(verdicts) - clean,
        "dropped": dropped.total(),
        "rows_out": len(verdicts),
        "train": split[SplitFate.TRAIN],
        "eval": split[SplitFate.EVAL],
        "formats": dict(sorted(sum((chunk.formats for chunk in chunks), Counter[str]()).items())),
        "rules": dict(sorted(rules.iter_rows())),
        "dropped_reasons": dict(sorted(dropped.items())),
        "dropped_first": {reason: first.where for reason, first in sorted(first_dropped.items())},
        "unread_keys": dict(sum((chunk.unread for chunk in chunks), Counter[str]()).most_common()),
        "pictures_written": num_images,
        "examples": {
            rule: {"origin": examples[rule].origin, "before": examples[rule].before, "after": examples[rule].after}
            for rule in sorted(rules["verdict"])
        },
    }


def _write_tables(chunks: list[JudgedChunk], rows: pl.DataFrame) -> None:
    taken: set[str] = set()
    ids = [
        make_unique_name(name, source_row, taken) if is_kept else None
        for name, source_row, is_kept in rows.select("id", "source_row", IS_KEPT).iter_rows()
    ]
    assigned = WAITING_FOLDER / "chosen.arrow"
    rows.select(pl.Series("id", ids, pl.String), "fate").write_ipc(assigned)
    with_fates = pl.concat([pl.scan_ipc(assigned), scan_waiting_rows(chunks).drop("id")], how="horizontal")
    for path, fate in ((TRAIN_FILE, SplitFate.TRAIN), (EVAL_FILE, SplitFate.EVAL)):
        split_rows = with_fates.filter(pl.col("fate") == int(fate)).select(conversations.FIXED_SCHEMA.names())
        conversations.stream_table(path, split_rows, conversations.FIXED_SCHEMA)


def count_dropped(chunks: list[JudgedChunk], rows: pl.DataFrame) -> tuple[Counter[str], dict[str, DroppedExample]]:
    """Return (number of dropped rows by reason, the first row of each reason)."""
    dropped = sum((chunk.dropped for chunk in chunks), Counter[str]())
    first_dropped = {reason: first for chunk in reversed(chunks) for reason, first in chunk.first_dropped.items()}
    duplicates = rows.filter(~IS_KEPT).group_by("fate").agg(pl.len(), pl.first("source", "source_row")).sort("fate")
    for fate, count, source, source_row in duplicates.iter_rows():
        reason = SplitFate(fate).name.lower()
        dropped[reason], first_dropped[reason] = count, DroppedExample(describe_origin(source, source_row))
    return dropped, first_dropped


def count_files(chunks: list[JudgedChunk], rows: pl.DataFrame, raw: Path) -> dict[str, dict[str, int]]:
    """Return the rows and kept rows of each file; note the files of which nothing is kept, and those that are not read."""
    names = [readers.name_source(file, raw) for file in readers.list_files(raw)]
    kept = Counter(rows.filter(IS_KEPT)["source"].to_list())
    read = Counter[str]()
    dropped = {name: Counter[str]() for name in names}
    for chunk in chunks:
        read[chunk.source] += chunk.rows_in
        dropped[chunk.source] += chunk.dropped
    for name in names:
        if not kept[name]:
            reasons = "".join(f", {count:,} {reason}" for reason, count in dropped[name].most_common())
            print(f"note: no row of {name} is kept: {read[name]:,} rows{reasons}")
    if ignored := readers.describe_ignored_files(raw):
        print(ignored)
    return {name: {"rows": read[name], "kept": kept[name]} for name in names}


def publish_images() -> int:
    """Move the images that the two tables name to IMAGES_FOLDER, and return their number; those of dropped rows are discarded."""
    column = pl.concat([pl.scan_parquet(path).select(pl.col("images").explode()) for path in (TRAIN_FILE, EVAL_FILE)])
    saved = column.filter(pl.col("images").str.starts_with(f"{IMAGES_FOLDER.as_posix()}/")).unique()
    names = [Path(path).name for path in saved.collect(engine="streaming")["images"]]
    with atomic.write_folder(IMAGES_FOLDER) as folder:  # even without images: dvc.yaml declares the folder as an out
        for name in names:
            shutil.move(WAITING_IMAGES_FOLDER / name, folder / name)
        if not names:
            (folder / "no_images").touch()  # of an empty folder DVC warns, at each stage that has it
    return len(names)


def make_unique_name(name: str, source_row: int, taken: set[str]) -> str:
    """Return `name`, with the source row appended where another row has it: later stages address answers by it."""
    while name in taken:
        name += f"@{source_row}"
    taken.add(name)
    return name


def check_split(
    split: Counter[int], dropped: Counter[str], first_dropped: dict[str, DroppedExample], params: FixData
) -> None:
    """Raise ValueError where a split has no rows: every later stage would fail on it."""
    rows = split.total()
    reasons = ", ".join(f"{reason} {n}" for reason, n in dropped.most_common()) or "it has no lines"
    if rows == 0:
        raise ValueError(
            f"{params.raw}: expected conversations to keep, found none ({reasons}); {_advise(dropped, first_dropped, params)}"
        )
    if split[SplitFate.EVAL] and split[SplitFate.TRAIN]:
        return
    name = "train" if split[SplitFate.EVAL] else "eval"
    if params.eval_file is not None:
        raise ValueError(
            f"fix_data.eval_file {', '.join(params.eval_file)} (eval_rows {params.eval_rows}) leaves the {name} split of "
            f"{rows} rows empty ({reasons}); change eval_rows, or give more rows"
        )
    change = "lower" if name == "train" else "raise"
    raise ValueError(
        f"fix_data.eval_share is {params.eval_share}, which leaves the {name} split of {rows} rows empty; "
        f"{change} it or give more rows"
    )


def _advise(dropped: Counter[str], first_dropped: dict[str, DroppedExample], params: FixData) -> str:
    """Return what to do where no row is kept: by the most frequent reason, and its first row where that says it."""
    if not dropped:
        return "add some, or give another path"
    reason = dropped.most_common(1)[0][0]
    first = first_dropped[reason]
    limits = {
        "too_long": f"raise fix_data.max_chars, which is {params.max_chars}",
        "too_short": f"lower fix_data.min_chars, which is {params.min_chars}",
    }
    if reason in limits:
        return limits[reason]
    if first.expected:
        return f"first {first.where}: {first.explanation}; see what each row becomes: aerie preview data"
    if reason == "unknown_format":
        return (
            f"{dropped[reason]} rows are of no known format, first {first.where}: {first.found}; the formats are "
            f"{chat_formats.describe_formats()}; name other keys in fix_data.columns, as {{prompt: ..., answer: ...}}, "
            "and see what each row becomes: aerie preview data"
        )
    if first.is_of_answer:
        return row_cleaning.advise_on_answers(params, reason)
    shown = f": {first.found}" if first.found else ""
    return f"fix the data (docs/data.md says what each reason means), first {first.where}{shown}"


def check_dropped(rows: int, dropped: Counter[str], first_dropped: dict[str, DroppedExample], params: FixData) -> None:
    """Raise ValueError where more than fix_data.max_dropped_share of the rows are dropped.

    The message has the reasons, since no report is written then.
    """
    most = params.max_dropped_share
    if most is None or dropped.total() <= most * rows:
        return
    reasons = "".join(
        f"\n  {reason} {count}, first {first.where}{': ' if first.found else ''}{first.explanation}"
        for reason, count in dropped.most_common()
        for first in [first_dropped[reason]]
    )
    raise ValueError(
        f"{params.raw}: {dropped.total()} of {rows} rows ({dropped.total() / rows:.0%}) are dropped, expected at most "
        f"{most:.0%} (fix_data.max_dropped_share):{reasons}\n  Mend the data or the parameters these reasons belong to "
        "(docs/data.md), or raise max_dropped_share"
    )


if __name__ == "__main__":
    run_stage(main)
