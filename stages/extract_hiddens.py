"""extract_hiddens: answers -> the target's hidden states.   python -m stages.extract_hiddens

One forward over prompt and answer, without the LM head, keeping the residual streams that enter the three feature
blocks and the last hidden state after the final norm. Stored unpadded, in large shards (formats/hiddens.py). Says
before it starts how many bytes it will write, and stops if they don't fit.
"""

import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import torch
from tqdm import tqdm

from stages import params
from stages.drafting import target
from stages.formats import atomic, conversations, hiddens, manifest
from stages.formats.hiddens import Row

SAMPLED, HIDDENS, REPORT = Path("data/sampled"), Path("data/hiddens"), Path("results/hiddens_report.json")
SPLITS = ("train", "eval", "eval_t")


def main() -> None:
    p = params.load()
    torch.set_num_threads(p.target.num_threads)
    started = time.perf_counter()
    made = manifest.read()
    tables = {s: conversations.read(SAMPLED / s, conversations.SAMPLED, "sample_target") for s in SPLITS}
    fitting = {s: t.filter(_length() <= p.extract_hiddens.max_length) for s, t in tables.items()}
    for split in ("train", "eval"):
        if fitting[split].is_empty():
            shortest = tables[split].select(_length().min()).item()
            raise ValueError(
                f"extract_hiddens: no row of the {split} split fits extract_hiddens.max_length "
                f"{p.extract_hiddens.max_length}; the shortest of {len(tables[split])} has {shortest} tokens: raise it"
            )
    dtype = getattr(torch, p.extract_hiddens.dtype)
    planned = sum(int(t.select(_length().sum()).item() or 0) for t in fitting.values())
    planned_bytes = _preflight(planned, hiddens.row_bytes(made.hidden_size, dtype))

    model = target.load(str(manifest.weights(made)), None, p.target.dtype, p.target.device, p.target.trust_remote_code)
    written = 0
    with tqdm(total=planned, desc="extract", unit="token", unit_scale=True, mininterval=2) as bar:
        for split, table in fitting.items():
            with atomic.folder(HIDDENS / split) as folder:
                rows = _forward(model, table, made.feature_layers, p.extract_hiddens.batch_tokens, bar)
                written += hiddens.write(folder, rows, dtype, p.extract_hiddens.shard_mib << 20)
    rows_in = sum(map(len, tables.values()))
    report: dict[str, Any] = {
        "rows_in": rows_in,
        "rows_out": written,
        "dropped": Counter({"longer than max_length": rows_in - sum(map(len, fitting.values()))}),
        "tokens": planned,
        "bytes": round(planned_bytes),
        "seconds": round(time.perf_counter() - started, 2),
    }
    assert report["rows_in"] == report["rows_out"] + sum(report["dropped"].values())
    atomic.write_json(REPORT, report)
    print(
        f"{written} rows, {planned} tokens, {planned_bytes / 2**20:.0f} MiB of {p.extract_hiddens.dtype} hidden states"
    )


def _length() -> pl.Expr:
    return pl.col("prompt_ids").list.len() + pl.col("answer_ids").list.len()


def _preflight(tokens: int, token_bytes: float) -> float:
    """Raises ValueError where the hidden states, 5% to spare, would not fit the disk."""
    HIDDENS.mkdir(parents=True, exist_ok=True)
    needed, free = tokens * token_bytes, shutil.disk_usage(HIDDENS).free
    print(f"{tokens} tokens x {token_bytes:.0f} bytes = {needed / 2**30:.2f} GiB; {free / 2**30:.1f} GiB are free")
    if needed * 1.05 > free:
        raise ValueError(
            f"extract_hiddens needs {needed * 1.05 / 2**30:.1f} GiB in {HIDDENS}, {free / 2**30:.1f} GiB are free; set "
            "extract_hiddens.dtype to bfloat16, lower sample_target.train_rows or extract_hiddens.max_length, or free space"
        )
    return needed


def _forward(model, table: pl.DataFrame, layers: list[int], batch_tokens: int, bar: tqdm) -> Iterator[Row]:
    """Rows in the order of their length, longest first: batches hold little padding, and memory runs out at once if ever."""
    rows = table.sort(_length(), "id", descending=[True, False]).to_dicts()
    while rows:
        width = len(rows[0]["prompt_ids"]) + len(rows[0]["answer_ids"])
        count = max(1, batch_tokens // width)
        batch, rows = rows[:count], rows[count:]
        ids = [torch.tensor(r["prompt_ids"] + r["answer_ids"], dtype=torch.int32) for r in batch]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(model.device, torch.int64)
        features, last = target.hidden_states(model, padded, layers)  # [B, T, 3H], [B, T, H]
        features, last = features.cpu(), last.cpu()
        for i, row in enumerate(batch):
            length, prompt_length = len(ids[i]), len(row["prompt_ids"])
            mask = torch.arange(length) >= prompt_length
            yield Row(
                row["id"], ids[i], mask, features[i, :length], last[i, :length], prompt_length, row["finish_reason"]
            )
            bar.update(length)


if __name__ == "__main__":
    params.run_stage(main)
