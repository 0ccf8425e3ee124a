"""Make shards: forward, copy to the host, checksum and write run concurrently."""

import queue
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from tqdm import tqdm

from stages.hidden_states.format import StoredHiddenStates
from stages.hidden_states.shard_plan import ShardTask, list_lengths
from stages.hidden_states.sources import HiddenStatesSource
from stages.hidden_states.writer import ShardWriter, StagingBuffer
from stages.runtime import atomic

MAX_OPEN_COMMITS = 2  # shards that are synced to disk at once
WRITER_THREADS = 6  # checksum, write and sync; each releases the GIL


def write_tokens_only(task: ShardTask) -> None:
    """Write a shard of tokens and masks with hidden states of width 0 (extract_hiddens.online)."""
    unfinished: set[ShardWriter] = set()
    shard = _open_shard(task, unfinished)
    empty = torch.empty(shard.offsets[-1], 0)
    finite = torch.ones(len(empty), dtype=torch.bool)
    shard.write_block(0, len(shard.headers), StoredHiddenStates(empty, empty), finite)
    _commit_shard(shard, task, [], unfinished)


def extract_shards(
    tasks: list[ShardTask], source: HiddenStatesSource, show: bool, on_written: Callable[[], None] = lambda: None
) -> None:
    """Compute and write the shards of `tasks`, with two staging buffers: one is written while the other is filled.

    `on_written` is called after each shard, from another thread.
    """
    lengths = [list_lengths(task.rows) for task in tasks]
    batches = [source.split_batches(row_lengths) for row_lengths in lengths]
    buffers = _allocate_buffers(tasks, lengths, batches, source.device)
    stream = torch.cuda.Stream(source.device) if source.device.type == "cuda" else None
    commits: deque[Future] = deque()
    unfinished: set[ShardWriter] = set()
    total = sum(map(sum, lengths))
    with (
        ExitStack() as at_exit,  # closed last, when no thread writes any more
        ThreadPoolExecutor(WRITER_THREADS) as pool,
        ThreadPoolExecutor(1) as writer,  # batches are written in turn
        ThreadPoolExecutor(MAX_OPEN_COMMITS) as committer,
        tqdm(total=total, desc="extract", unit="token", unit_scale=True, mininterval=2) as bar,
    ):
        bar.disable = not show
        at_exit.callback(_discard_shards, unfinished)
        for task, task_batches in zip(tasks, batches, strict=True):
            shard = _open_shard(task, unfinished)
            writes: list[Future] = []
            for batch in task_batches:
                buffer = buffers.get()
                for failed in (write for write in writes if write.done()):
                    failed.result()
                source.fill_buffer(shard.headers[batch.start : batch.stop], buffer)
                buffer.start_copy(stream)
                writes.append(writer.submit(_write_batch, shard, batch, buffer, buffers, pool))
                bar.update(buffer.num_tokens)
            commits.append(committer.submit(_commit_shard, shard, task, writes, unfinished, on_written))
            if len(commits) > 2 * MAX_OPEN_COMMITS:  # back-pressure of a slow disk
                commits.popleft().result()
        for commit in commits:
            commit.result()


def _allocate_buffers(
    tasks: list[ShardTask], lengths: list[list[int]], batches: list[list[range]], device: torch.device
) -> "queue.Queue[StagingBuffer]":
    """Return two buffers, each large enough for any batch."""
    image_tokens = [task.size.count_image_tokens(task.rows) for task in tasks]
    max_tokens, max_image_tokens = (
        max(sum(row[i] for i in batch) for row, cut in zip(counts, batches, strict=True) for batch in cut)
        for counts in (lengths, image_tokens)
    )
    buffers: queue.Queue[StagingBuffer] = queue.Queue()
    for _ in range(2):
        buffers.put(StagingBuffer(max_tokens, max_image_tokens, tasks[0].size, device))
    return buffers


def _open_shard(task: ShardTask, unfinished: set[ShardWriter]) -> ShardWriter:
    task.folder.mkdir(parents=True, exist_ok=True)
    with _translate_disk_errors(task.path):
        shard = ShardWriter(task.path, task.make_headers(), task.size)
    unfinished.add(shard)
    return shard


def _write_batch(
    shard: ShardWriter,
    batch: range,
    buffer: StagingBuffer,
    buffers: "queue.Queue[StagingBuffer]",
    pool: ThreadPoolExecutor,
) -> None:
    try:
        block, finite = buffer.wait_for_copy()
        with _translate_disk_errors(shard.path):
            shard.write_block(batch.start, len(batch), block, finite, pool.map)
    finally:
        buffers.put(buffer)


def _discard_shards(unfinished: set[ShardWriter]) -> None:
    for shard in unfinished:
        shard.discard()


def _commit_shard(
    shard: ShardWriter,
    task: ShardTask,
    writes: list[Future],
    unfinished: set[ShardWriter],
    on_written: Callable[[], None] = lambda: None,
) -> None:
    for write in writes:
        write.result()
    with _translate_disk_errors(shard.path):
        atomic.write_json(task.entries_path, [entry.to_record() for entry in shard.commit()])
    unfinished.remove(shard)
    on_written()


@contextmanager
def _translate_disk_errors(path: Path) -> Iterator[None]:
    """Raise ValueError naming the shard that could not be written; `run_stage` explains a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise ValueError(
            f"{path} could not be written ({error}); fix that and run again: finished shards are kept"
        ) from None
