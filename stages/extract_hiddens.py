"""extract_hiddens: answers -> the target's hidden states.   python -m stages.extract_hiddens

One forward over prompt and answer, without the LM head, keeps the residual streams that enter the feature layers and
the last hidden state after the final norm. Documents are packed end to end: no padding is computed or stored. The number of
bytes to be written is printed first, and the stage stops if they do not fit.

Shards and batches are planned from row lengths alone. So the same bytes come from this process, from one of several
(`processes`, or any launcher that sets RANK and WORLD_SIZE, on hosts that share the folder), and from a later run that
resumes a killed one. docs/hiddens.md
"""

import os
import shutil
import time
from collections import Counter
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import polars as pl
import torch

from stages.data import conversations
from stages.hidden_states import extraction, format, importers, reader, shard_plan, sources, writer
from stages.hidden_states.format import IndexEntry
from stages.hidden_states.shard_plan import TOKENS_ONLY_SIZE, ShardTask, StoredRowSize
from stages.params import checks, schema, stage_inputs
from stages.params.units import format_bytes
from stages.runtime import atomic, distributed, scratch
from stages.target import manifest
from stages.target.manifest import TargetManifest
from stages.telemetry.run_stage import run_stage

SAMPLED, HIDDENS, REPORT = Path("data/sampled"), Path("data/hiddens"), Path("results/hiddens_report.json")
SPLITS = ("train", "eval", "eval_t")
ENTRIES_TIMEOUT_S = 60  # until a file that another host has written is visible here


def main() -> None:
    p = stage_inputs.read_params("extract_hiddens")
    if distributed.launch_ranks("extract_hiddens", [], p.extract_hiddens.processes):
        return
    _extract(p)


def _extract(p: schema.Params) -> None:
    e = p.extract_hiddens
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    store = next(torch.distributed.rendezvous("env://", rank, world))[0] if world > 1 else None  # waits for all
    torch.set_num_threads(p.target.num_threads)
    started = time.perf_counter()
    target = manifest.read_manifest()
    layers = target.feature_layers
    checks.check_segment_layers(p, layers)  # a segment may be newer than the target
    size = StoredRowSize(len(layers), target.hidden_size, format.DTYPES[e.dtype], target.image_token_id)
    tables = {s: conversations.read_table(SAMPLED / s, conversations.SAMPLED_SCHEMA, "sample_target") for s in SPLITS}
    fitting = {s: shard_plan.fit_rows(t, e.max_length, e.longer_rows == "truncate") for s, t in tables.items()}
    _check_some_fit(tables, fitting, e.max_length)
    kept = fitting
    if size.image_token_id is not None:  # the target could not read an image token in an answer again: it has no image
        readable = ~pl.col("answer_ids").list.contains(size.image_token_id)
        kept = {s: t.filter(readable) for s, t in fitting.items()}
    _check_images(kept, size.image_token_id)
    scratch_folder = _locate_scratch(p, target)
    folder = HIDDENS / f".unfinished-{scratch_folder.name.rsplit('-', 1)[1]}"
    sizes = dict.fromkeys(SPLITS, size) | ({"train": TOKENS_ONLY_SIZE} if e.online else {})
    plans = [shard_plan.plan_split(s, kept[s], sizes[s], e.shard_mib << 20, folder / s) for s in SPLITS]
    tasks = [task for plan in plans for task in plan]
    if rank == 0:
        print(
            f"a token has features of {len(layers)} layers, the streams entering blocks {layers}, and its last hidden state: "
            f"{size.token_bytes:,.0f} bytes in {e.dtype}"
        )
        _print_plan(tasks)
    mine = [task for i, task in enumerate(tasks) if i % world == rank and not task.is_written()]
    for task in (task for task in mine if not task.size.hidden_size):
        extraction.write_tokens_only(task)
    if with_states := [task for task in mine if task.size.hidden_size]:
        source = sources.open_source(p, target, kept)
        extraction.extract_shards(with_states, source, rank == 0, lambda: _note_progress(tasks))
    if store is not None:
        store.set(f"extracted/{rank}", "done")
    if rank:
        return
    if store is not None:  # a launcher ends us if one of them dies
        store.wait([f"extracted/{r}" for r in range(world)], timedelta(days=30))
    for split in SPLITS:
        _publish_split(split, [task for task in tasks if task.split == split], folder / split, target)
    for old in HIDDENS.glob(".unfinished-*"):  # this one is empty now; others are of earlier parameters
        shutil.rmtree(old, ignore_errors=True)
    _write_report(p, tables, fitting, tasks, size, started)


def _write_report(
    p: schema.Params,
    tables: dict[str, pl.DataFrame],
    fitting: dict[str, pl.DataFrame],
    tasks: list[ShardTask],
    size: StoredRowSize,
    started: float,
) -> None:
    """Write results/hiddens_report.json and print its summary."""
    rows_in, rows_out = sum(map(len, tables.values())), sum(len(task.rows) for task in tasks)
    report: dict[str, Any] = {
        "rows_in": rows_in,
        "rows_out": rows_out,
        "dropped": Counter({"longer than max_length": rows_in - sum(map(len, fitting.values()))}),
        "tokens": sum(shard_plan.count_tokens(task.rows) for task in tasks),
        "bytes": _count_bytes(tasks),
        "seconds": round(time.perf_counter() - started, 2),
    }
    if p.extract_hiddens.longer_rows == "truncate":
        report["truncated"] = sum(_count_longer(t, p.extract_hiddens.max_length) for t in tables.values())
        report["truncated"] -= report["dropped"]["longer than max_length"]
    if size.image_token_id is not None:
        report["dropped"]["a picture's token in the answer"] = sum(map(len, fitting.values())) - rows_out
    assert report["rows_in"] == report["rows_out"] + sum(report["dropped"].values())
    atomic.write_json(REPORT, report)
    e = p.extract_hiddens
    if report.get("truncated"):
        print(f"{report['truncated']} rows are longer than max_length {e.max_length}: their answers are cut there")
    online = "; those of training rows are made online, by train_draft" if e.online else ""
    print(
        f"{rows_out} rows, {report['tokens']} tokens, {format_bytes(_count_bytes(tasks))} of {e.dtype} hidden states{online}"
    )


def _count_longer(table: pl.DataFrame, max_length: int) -> int:
    return int(table.select((shard_plan.make_length_expr() > max_length).sum()).item() or 0)


def _check_images(tables: dict[str, pl.DataFrame], image_token_id: int | None) -> None:
    count = sum(int(t["images"].list.len().sum() or 0) for t in tables.values())
    if count and image_token_id is None:
        raise ValueError(
            f"data/sampled has {count} images, expected none for this target, whose class takes none here (docs/hiddens.md, "
            "Which targets); name data without images in fix_data.raw, or take another target.model"
        )


def _check_some_fit(tables: dict[str, pl.DataFrame], fitting: dict[str, pl.DataFrame], max_length: int) -> None:
    for split in ("train", "eval"):
        if fitting[split].is_empty() and (
            split == "eval" or len(tables[split])
        ):  # no training row at all: none is asked for
            shortest = tables[split].select(shard_plan.make_length_expr().min()).item()
            raise ValueError(
                f"extract_hiddens: no row of the {split} split fits extract_hiddens.max_length {max_length}; the shortest of "
                f"{len(tables[split])} has {shortest} tokens: raise it"
            )


def _locate_scratch(p: schema.Params, target: TargetManifest) -> Path:
    """Return the folder in .scratch of these shards, named by everything their bytes depend on.

    Only its name and its lock are used: unfinished shards are on the disk that will hold them.
    """
    e = p.extract_hiddens
    settings = e.model_dump(exclude={"processes"})  # how many processes work on it changes no byte
    numerics = (p.target.dtype, p.target.device.split(":")[0], p.target.num_threads)
    imported = importers.fingerprint_folder(Path(e.import_)) if e.import_ else None
    return scratch.locate_scratch(
        "extract_hiddens", asdict(target), settings, numerics, imported, scratch.digest_folder(SAMPLED)
    )


def _print_plan(tasks: list[ShardTask]) -> None:
    """Print the bytes of all shards and of those to be written. Raises ValueError where these do not fit the disk."""
    for size in dict.fromkeys(task.size for task in tasks):
        rows = [task.rows for task in tasks if task.size == size]
        tokens = sum(map(shard_plan.count_tokens, rows))
        image_tokens = sum(sum(size.count_image_tokens(task_rows)) for task_rows in rows)
        images = f" + {image_tokens} image tokens x {size.image_token_bytes} bytes" if image_tokens else ""
        total = round(sum(map(size.count_bytes, rows)))
        print(f"{tokens} tokens x {size.token_bytes:.0f} bytes{images} = {format_bytes(total)}")
    todo = [task for task in tasks if not task.is_written()]
    _check_disk_space(_count_bytes(todo))
    if len(todo) < len(tasks):
        print(f"resumed: {len(tasks) - len(todo)} of {len(tasks)} shards were done before")
        _note_progress(tasks)


def _note_progress(tasks: list[ShardTask]) -> None:
    scratch.note_progress(f"after {sum(task.is_written() for task in tasks)} of {len(tasks)} shards")


def _count_bytes(tasks: list[ShardTask]) -> int:
    return round(sum(task.size.count_bytes(task.rows) for task in tasks))


def _check_disk_space(needed: int) -> None:
    """Raise ValueError where `needed` bytes and 5% more do not fit the disk."""
    HIDDENS.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(HIDDENS).free
    print(f"{format_bytes(needed)} of them are to be written; {format_bytes(free)} are free")
    if needed * 1.05 > free:
        raise ValueError(
            f"extract_hiddens needs {format_bytes(needed * 1.05)} in {HIDDENS}, {format_bytes(free)} are free; set "
            "extract_hiddens.dtype to bfloat16 or fp8, lower sample_target.train_rows or extract_hiddens.max_length, or free "
            "space"
        )


def _publish_split(split: str, tasks: list[ShardTask], folder: Path, target: TargetManifest) -> None:
    """Move the split's shards, index and origin into place."""
    folder.mkdir(parents=True, exist_ok=True)
    reader.write_origin(folder, split, target)
    if not (folder / "index.parquet").exists():
        writer.write_index(folder, [entry for task in tasks for entry in _read_entries(task)])
    for task in tasks:
        task.entries_path.unlink(missing_ok=True)
    atomic.replace_folder(folder, HIDDENS / split)


def _read_entries(task: ShardTask) -> list[IndexEntry]:
    deadline = time.monotonic() + ENTRIES_TIMEOUT_S
    while not task.entries_path.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    with scratch.check_unfinished(task.folder):
        return [IndexEntry(**entry) for entry in atomic.read_json(task.entries_path, "extract_hiddens", list)]


if __name__ == "__main__":
    run_stage(main, lambda: (p := schema.load_params()).target.gpus(p.extract_hiddens.processes))
