"""extract_hiddens: answers -> the target's hidden states.   python -m stages.extract_hiddens

One forward over prompt and answer, without the LM head, keeping the residual streams that enter the three feature
blocks and the last hidden state after the final norm. Documents lie end to end, so no padding is computed or stored.
Says before it starts how many bytes it will write, and stops if they don't fit.

The work is cut into shards before it starts, from the rows' lengths alone, and each shard into batches. So whoever
makes a shard makes the same bytes: this process, one of several (`processes`, or any launcher that sets RANK and
WORLD_SIZE, on hosts that share the folder), or a later run that goes on where this one was killed. docs/hiddens.md
"""

import contextlib
import os
import queue
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor
from tqdm import tqdm

from stages.data import conversations
from stages.hidden_states import format, importers, origin, writer
from stages.hidden_states.format import RowHeader, ShardWriter, StoredHiddenStates
from stages.hidden_states.writer import StagingBuffer
from stages.params import schema
from stages.runtime import atomic, distributed, scratch
from stages.target import hooks, loading, manifest, multimodal, packed_forward
from stages.target.manifest import TargetManifest
from stages.target.vision import CachedImageProcessor
from stages.telemetry.run_stage import run_stage

SAMPLED, HIDDENS, REPORT = Path("data/sampled"), Path("data/hiddens"), Path("results/hiddens_report.json")
SPLITS = ("train", "eval", "eval_t")
MAX_OPEN_COMMITS = 2  # shards that are synced to disk at once
WRITER_THREADS = 6  # that sum, write and sync; each lets Python's lock go
ENTRIES_TIMEOUT_S = 60  # until a file that another host has written shows here


@dataclass(frozen=True)
class ShardTask:
    """One shard to make: rows of a split, in the order they are stored."""

    split: str
    number: int
    rows: pl.DataFrame
    folder: Path  # unfinished, beside its place: on the disk that will hold it
    size: "StoredRowSize"

    @property
    def path(self) -> Path:
        return self.folder / format.name_shard(self.number)

    @property
    def entries(self) -> Path:
        """The shard's part of the index; once it is there, the shard is done."""
        return self.path.with_suffix(".json")

    def done(self) -> bool:
        return self.entries.exists() or (self.folder / "index.parquet").exists()

    def heads(self) -> list[RowHeader]:
        return [_make_header(row, self.size.token) for row in self.rows.iter_rows(named=True)]


def main() -> None:
    p = schema.load_params()
    e = p.extract_hiddens  # but for `processes` all of it is tracked: how many work on it changes no byte
    if distributed.launch_ranks("extract_hiddens", [], e.processes):
        return
    with contextlib.ExitStack() as stack:
        _main(p, stack)


def _main(p: schema.Params, stack: contextlib.ExitStack) -> None:
    e = p.extract_hiddens
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    store = next(torch.distributed.rendezvous("env://", rank, world))[0] if world > 1 else None  # waits for all
    torch.set_num_threads(p.target.num_threads)
    started = time.perf_counter()
    made = manifest.read_manifest()
    whole = StoredRowSize.of(made, format.DTYPES[e.dtype])
    sizes = dict.fromkeys(SPLITS, whole) | ({"train": TOKENS_ONLY_SIZE} if e.online else {})
    tables = {s: conversations.read_table(SAMPLED / s, conversations.SAMPLED_SCHEMA, "sample_target") for s in SPLITS}
    fitting = {s: t.filter(_make_length_expr() <= e.max_length) for s, t in tables.items()}
    _check_some_fit(tables, fitting, e.max_length)
    kept = {s: t.filter(_make_readable_expr(whole.token)) for s, t in fitting.items()}
    _check_images(kept, whole.token)
    ours = _scratch(p, made)
    stack.enter_context(scratch.held(ours))
    place = HIDDENS / f".unfinished-{ours.name.rsplit('-', 1)[1]}"
    work = [w for s in SPLITS for w in _plan_shards(s, kept[s], sizes[s], e.shard_mib << 20, place / s)]
    todo = [w for w in work if not w.done()]
    if rank == 0:
        _print_plan(work)
        _check_disk_space(_count_bytes(todo))
        if len(todo) < len(work):
            print(f"resumed: {len(work) - len(todo)} of {len(work)} shards were done before")
    mine = [w for i, w in enumerate(work) if i % world == rank and not w.done()]
    for w in (w for w in mine if not w.size.hidden_size):
        _write_tokens_only(w)
    if states := [w for w in mine if w.size.hidden_size]:
        _extract_shards(states, _open_source(p, made, kept), whole, show=rank == 0)
    if not _wait_for_all(store, rank, world):
        return
    for split in SPLITS:
        _publish_split(split, [w for w in work if w.split == split], place / split, made)
    for old in HIDDENS.glob(".unfinished-*"):  # this one is empty now; others are of earlier parameters
        shutil.rmtree(old, ignore_errors=True)

    rows_in, rows_out = sum(map(len, tables.values())), sum(len(w.rows) for w in work)
    seconds = time.perf_counter() - started
    report: dict[str, Any] = {
        "rows_in": rows_in,
        "rows_out": rows_out,
        "dropped": Counter({"longer than max_length": rows_in - sum(map(len, fitting.values()))}),
        "tokens": sum(_count_tokens(w.rows) for w in work),
        "bytes": _count_bytes(work),
        "seconds": round(seconds, 2),
    }
    if whole.token is not None:
        report["dropped"]["a picture's token in the answer"] = sum(map(len, fitting.values())) - rows_out
    assert report["rows_in"] == report["rows_out"] + sum(report["dropped"].values())
    atomic.write_json(REPORT, report)
    where = "; those of training rows are made online, by train_draft" if e.online else ""
    print(
        f"{rows_out} rows, {report['tokens']} tokens, {_count_bytes(work) / 2**20:.0f} MiB of {e.dtype} hidden states{where}"
    )


# What is to be done


@dataclass(frozen=True)
class StoredRowSize:
    """What rows take on disk."""

    hidden_size: int
    dtype: torch.dtype
    token: int | None  # stands for a piece of a picture
    token_bytes: float
    piece_bytes: int

    @classmethod
    def of(cls, made: TargetManifest, dtype: torch.dtype) -> "StoredRowSize":
        token = made.image_token_id
        token_bytes = format.count_token_bytes(made.hidden_size, dtype, sees=token is not None)
        return cls(made.hidden_size, dtype, token, token_bytes, format.count_visual_bytes(made.hidden_size, dtype))

    def pieces(self, rows: pl.DataFrame) -> list[int]:
        """Of each row, tokens that stand for a piece of a picture."""
        if self.token is None:
            return [0] * len(rows)
        return rows.select(pl.col("prompt_ids").list.count_matches(self.token)).to_series().to_list()

    def of_rows(self, rows: pl.DataFrame) -> float:
        """Bytes of these rows."""
        return _count_tokens(rows) * self.token_bytes + sum(self.pieces(rows)) * self.piece_bytes


# Where the trainer makes the hidden states: rows of width 0.
TOKENS_ONLY_SIZE = StoredRowSize(0, torch.float32, None, format.count_token_bytes(0, torch.float32), 0)


def _make_readable_expr(token: int | None) -> pl.Expr:
    """Whether the target can be given this answer again: with a token in it that stands for a picture there is none of, not."""
    return pl.lit(True) if token is None else ~pl.col("answer_ids").list.contains(token)


def _check_images(tables: dict[str, pl.DataFrame], token: int | None) -> None:
    shown = sum(int(t["images"].list.len().sum() or 0) for t in tables.values())
    if shown and token is None:
        raise ValueError(
            f"data/sampled has {shown} pictures, expected none for this target, whose class sees none here (docs/hiddens.md, "
            "Which targets); name data without pictures in fix_data.raw, or take another target.model"
        )


def _make_length_expr() -> pl.Expr:
    return pl.col("prompt_ids").list.len() + pl.col("answer_ids").list.len()


def _count_tokens(table: pl.DataFrame) -> int:
    return int(table.select(_make_length_expr().sum()).item() or 0)


def _count_bytes(work: list[ShardTask]) -> int:
    return round(sum(w.size.of_rows(w.rows) for w in work))


def _check_some_fit(tables: dict[str, pl.DataFrame], fitting: dict[str, pl.DataFrame], max_length: int) -> None:
    for split in ("train", "eval"):
        if fitting[split].is_empty():
            shortest = tables[split].select(_make_length_expr().min()).item()
            raise ValueError(
                f"extract_hiddens: no row of the {split} split fits extract_hiddens.max_length {max_length}; the shortest of "
                f"{len(tables[split])} has {shortest} tokens: raise it"
            )


def _scratch(p: schema.Params, made: TargetManifest) -> Path:
    """Return the place in .scratch of these shards, named by all that a byte of one depends on.

    Only its name and its lock are used: unfinished shards lie beside their own place, on the disk that will hold them.
    """
    e = p.extract_hiddens
    ours = e.model_dump(exclude={"processes"})
    numerics = (p.target.dtype, p.target.device.split(":")[0], p.target.num_threads)
    given = importers.fingerprint_folder(Path(e.import_)) if e.import_ else None
    return scratch.locate_scratch(
        "extract_hiddens", asdict(made), ours, numerics, given, scratch.digest_folder(SAMPLED)
    )


def _plan_shards(
    split: str, table: pl.DataFrame, size: StoredRowSize, shard_bytes: int, folder: Path
) -> list[ShardTask]:
    """The split's shards. Longest rows first: batches are of like lengths, and memory runs out at once if ever."""
    rows = table.sort(_make_length_expr(), "id", descending=[True, False])
    lengths = rows.select(_make_length_expr()).to_series().to_list()
    spans = format.plan_shards(lengths, size.token_bytes, shard_bytes, size.pieces(rows), size.piece_bytes)
    return [ShardTask(split, number, rows[span.start : span.stop], folder, size) for number, span in enumerate(spans)]


def _print_plan(work: list[ShardTask]) -> None:
    for size in dict.fromkeys(w.size for w in work):
        alike = [w for w in work if w.size == size]
        tokens, pieces = sum(_count_tokens(w.rows) for w in alike), sum(sum(size.pieces(w.rows)) for w in alike)
        pictures = f" + {pieces} pieces of pictures x {size.piece_bytes} bytes" if pieces else ""
        print(f"{tokens} tokens x {size.token_bytes:.0f} bytes{pictures} = {_count_bytes(alike) / 2**30:.2f} GiB")


def _check_disk_space(needed: int) -> None:
    """Raises ValueError where so many bytes, 5% to spare, would not fit the disk."""
    HIDDENS.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(HIDDENS).free
    print(f"{needed / 2**30:.2f} GiB of them are to be written; {free / 2**30:.1f} GiB are free")
    if needed * 1.05 > free:
        raise ValueError(
            f"extract_hiddens needs {needed * 1.05 / 2**30:.1f} GiB in {HIDDENS}, {free / 2**30:.1f} GiB are free; set "
            "extract_hiddens.dtype to bfloat16 or fp8, lower sample_target.train_rows or extract_hiddens.max_length, or free "
            "space"
        )


def _make_header(row: dict[str, Any], token: int | None) -> RowHeader:
    ids = torch.tensor(row["prompt_ids"] + row["answer_ids"], dtype=torch.int32)
    return RowHeader(
        row["id"], ids, torch.arange(len(ids)) >= len(row["prompt_ids"]), len(row["prompt_ids"]), row["finish_reason"],
        None if token is None else ids == token,
    )  # fmt: skip


# Where hidden states come from


@dataclass(frozen=True)
class HiddenStatesSource:
    """What fills slots: `fill(heads, slot)` with the hidden states of these rows, `cut(lengths)` into batches before."""

    fill: Callable[[list[RowHeader], StagingBuffer], None]
    cut: Callable[[list[int]], list[range]]
    device: torch.device


def _open_source(p: schema.Params, made: TargetManifest, tables: dict[str, pl.DataFrame]) -> HiddenStatesSource:
    e, token = p.extract_hiddens, made.image_token_id
    rows = (row for table in tables.values() for row in table.iter_rows(named=True))
    if e.import_ is not None:
        given = importers.find_hidden_states(
            Path(e.import_), {row["id"]: _make_header(row, token) for row in rows}, made.hidden_size
        )
        stored = partial(_fill_from_import, given, format.DTYPES[e.dtype])
        return HiddenStatesSource(stored, partial(_batch_rows, e.batch_tokens, False), torch.device("cpu"))
    where = (p.target.dtype, distributed.select_rank_device(p.target.device), p.target.trust_remote_code)
    model = loading.load_target(str(manifest.resolve_weights_folder(made)), None, *where)
    packed = packed_forward.supports_packing(model)
    if not packed:
        print(
            f"{made.model}: its attention takes no documents end to end, so they are padded to like lengths", flush=True
        )
    if e.compile and packed:
        packed_forward.compile_blocks(model, e.batch_tokens)
    fill = partial(_fill_from_target, model, made.feature_layers, packed)
    if token is not None:
        eyes = CachedImageProcessor(str(manifest.resolve_weights_folder(made)), p.target.trust_remote_code)
        fill = partial(
            _fill_from_multimodal_target, model, fill, eyes, {row["id"]: row["images"] for row in rows if row["images"]}
        )
    return HiddenStatesSource(
        fill,
        partial(_batch_rows, e.batch_tokens, not packed),
        model.device,
    )


def _batch_rows(batch_tokens: int, padded: bool, lengths: list[int]) -> list[range]:
    """Consecutive rows, longest first, of at most `batch_tokens` tokens, with padding where it is computed; one row at least."""
    batches, first, tokens = [], 0, 0
    for row, length in enumerate(lengths):
        size = lengths[first] if padded else length
        if row > first and tokens + size > batch_tokens:
            batches.append(range(first, row))
            first, tokens = row, 0
        tokens += lengths[first] if padded else length
    return [*batches, range(first, len(lengths))]


def _fill_from_target(
    model: Any,
    layers: list[int],
    packed: bool,
    heads: list[RowHeader],
    slot: StagingBuffer,
    view: multimodal.MultimodalInputs | None = None,
) -> None:
    """The target's own hidden states."""
    lengths = [len(h.ids) for h in heads]
    ids = multimodal.copy_to_device(torch.cat([h.ids for h in heads]).long(), model.device)  # [N]
    with hooks.tap_residual_streams(
        model, layers, lambda part, stream: slot.keep(part, packed_forward.unpad_stream(stream, lengths))
    ):
        slot.keep(writer.LAST_HIDDEN_PART, packed_forward.forward_documents(model, ids, lengths, packed, view))


def _fill_from_multimodal_target(
    model: Any,
    forward: Callable[..., None],
    eyes: CachedImageProcessor,
    images: dict[str, list[str]],
    heads: list[RowHeader],
    slot: StagingBuffer,
) -> None:
    """The same of a target that sees: with the rows' pictures, and what its decoder was given in their place."""
    lengths = [len(h.ids) for h in heads]
    pictures = [eyes.see(images[h.id]) if h.id in images else None for h in heads]
    view = multimodal.build_multimodal_inputs(model, [f"row {h.id}" for h in heads], [h.ids for h in heads], pictures)
    pieces = multimodal.copy_to_device(view.pictured.nonzero()[:, 0], model.device)  # [M]

    def keep(embeds: Tensor, positions: Tensor) -> None:
        slot.see(packed_forward.unpad_stream(positions, lengths), packed_forward.unpad_stream(embeds, lengths)[pieces])

    with hooks.tap_decoder_inputs(model, keep):
        forward(heads, slot, view=view)


def _fill_from_import(
    given: importers.ReadStored, dtype: torch.dtype, heads: list[RowHeader], slot: StagingBuffer
) -> None:
    """Hidden states made elsewhere. Those in the dtype that is asked for stay as they are, to the bit."""
    parts = []
    for head in heads:
        block = given(head)
        if block.last.dtype != dtype:
            numbers = [
                format.decode_numbers(block.features, block.features_scale),
                format.decode_numbers(block.last, block.last_scale),
            ]
            (low_mid_high, fs), (last, ls) = (
                format.encode_numbers(numbers[0], dtype, format.NUM_FEATURE_LAYERS),
                format.encode_numbers(numbers[1], dtype),
            )
            visual = None if block.visual is None else format.decode_numbers(block.visual, block.visual_scale)
            seen = (None, None) if visual is None else format.encode_numbers(visual, dtype)
            block = StoredHiddenStates(low_mid_high, last, fs, ls, block.positions, *seen)
        parts.append(block)
    names = parts[0].tensors()
    slot.put(StoredHiddenStates(**{name: torch.cat([part.tensors()[name] for part in parts]) for name in names}))


# Compute, copy, sum and write, each beside the others


def _write_tokens_only(work: ShardTask) -> None:
    """A shard of rows whose hidden states are of width 0: the trainer makes them."""
    work.folder.mkdir(parents=True, exist_ok=True)
    shard = ShardWriter(work.path, work.heads(), 0, torch.float32)
    nothing = torch.empty(shard.offsets[-1], 0)
    shard.put(0, len(shard.heads), StoredHiddenStates(nothing, nothing), torch.ones(len(nothing), dtype=torch.bool))
    _commit_shard(shard, work, [], {shard})


def _extract_shards(work: list[ShardTask], source: HiddenStatesSource, size: StoredRowSize, show: bool) -> None:
    """Two slots: while one's batch is copied and written, the next one is computed."""
    lengths = {w.path: w.rows.select(_make_length_expr()).to_series().to_list() for w in work}
    batches = {w.path: source.cut(lengths[w.path]) for w in work}
    pieces = {w.path: size.pieces(w.rows) for w in work}
    tokens, seen = (
        max(sum(counts[path][i] for i in batch) for path, cut in batches.items() for batch in cut)
        for counts in (lengths, pieces)
    )
    side = torch.cuda.Stream(source.device) if source.device.type == "cuda" else None
    free: queue.Queue[StagingBuffer] = queue.Queue()
    for _ in range(2):
        free.put(StagingBuffer(tokens, seen, size.hidden_size, size.dtype, size.token is not None, source.device))
    commits: deque[Future] = deque()
    unfinished: set[ShardWriter] = set()
    with (
        ExitStack() as at_end,  # closed last, when no thread writes any more
        ThreadPoolExecutor(WRITER_THREADS) as pool,
        ThreadPoolExecutor(1) as writer,  # batches are stored in turn
        ThreadPoolExecutor(MAX_OPEN_COMMITS) as committer,
        tqdm(
            total=sum(map(sum, lengths.values())), desc="extract", unit="token", unit_scale=True, mininterval=2
        ) as bar,
    ):
        bar.disable = not show
        at_end.callback(_discard, unfinished)
        for w in work:
            w.folder.mkdir(parents=True, exist_ok=True)
            heads = w.heads()
            stores: list[Future] = []
            with _translate_disk_errors(w.path):
                shard = ShardWriter(w.path, heads, size.hidden_size, size.dtype)
            unfinished.add(shard)
            for batch in batches[w.path]:
                slot = free.get()
                for failed in (f for f in stores if f.done()):
                    failed.result()
                source.fill(heads[batch.start : batch.stop], slot)
                slot.send(side)
                stores.append(writer.submit(_write_batch, shard, batch, slot, free, pool))
                bar.update(slot.tokens)
            commits.append(committer.submit(_commit_shard, shard, w, stores, unfinished))
            if len(commits) > 2 * MAX_OPEN_COMMITS:  # a slow disk holds us up here
                commits.popleft().result()
        for commit in commits:
            commit.result()


def _write_batch(
    shard: ShardWriter, batch: range, slot: StagingBuffer, free: queue.Queue, pool: ThreadPoolExecutor
) -> None:
    try:
        block, finite = slot.host()
        with _translate_disk_errors(shard.path):
            shard.put(batch.start, len(batch), block, finite, pool.map)
    finally:
        free.put(slot)


def _commit_shard(shard: ShardWriter, work: ShardTask, stores: list[Future], unfinished: set[ShardWriter]) -> None:
    for stored in stores:
        stored.result()
    with _translate_disk_errors(shard.path):
        atomic.write_json(work.entries, shard.commit())
    unfinished.remove(shard)


def _discard(unfinished: set[ShardWriter]) -> None:
    for shard in unfinished:
        shard.discard()


@contextmanager
def _translate_disk_errors(path: Path) -> Iterator[None]:
    """Say which shard could not be written; of a full disk `run_stage` says so."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise ValueError(
            f"{path} could not be written ({error}); mend that and run again: finished shards are kept"
        ) from None


# Several processes


def _wait_for_all(store: Any, rank: int, world: int) -> bool:
    """Waits until every process has made its shards; True in the one that finishes the work."""
    if store is not None:
        store.set(f"extracted/{rank}", "done")
        if rank == 0:  # a launcher ends us if one of them dies
            store.wait([f"extracted/{r}" for r in range(world)], timedelta(days=30))
    return rank == 0


def _publish_split(split: str, work: list[ShardTask], folder: Path, made: TargetManifest) -> None:
    """The split's shards, their index and whose they are take their place."""
    folder.mkdir(parents=True, exist_ok=True)
    origin.write_origin(folder, split, made)
    if not (folder / "index.parquet").exists():
        entries = [entry for w in work for entry in _read_entries(w)]
        format.write_index(folder, entries)
    for w in work:
        w.entries.unlink(missing_ok=True)
    atomic.replace_folder(folder, HIDDENS / split)


def _read_entries(work: ShardTask) -> list[dict[str, Any]]:
    deadline = time.monotonic() + ENTRIES_TIMEOUT_S
    while not work.entries.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    with scratch.reading(work.folder):
        return atomic.read_json(work.entries, "extract_hiddens", list)


def _list_stage_gpus() -> list[int]:
    p = schema.load_params()
    return p.target.gpus(p.extract_hiddens.processes)


if __name__ == "__main__":
    run_stage(main, _list_stage_gpus)
