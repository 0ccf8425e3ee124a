"""Hidden states on disk: a few large safetensors shards and an index, unpadded.

A shard holds rows end to end: `features` [N, 3H] (low, mid, high), `last` [N, H] (after the final norm), `ids` [N]
int32 and `mask` (one bit a token: is it the assistant's?). `index.parquet` says where each row lies, with its checksum
and whether all its numbers are finite. 4H numbers and 4 bytes and a bit a token: at H = 4096 in bfloat16, 32.8 kB.
"""

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

INDEX = pl.Schema(
    {
        "id": pl.String,
        "shard": pl.String,
        "offset": pl.Int64,  # first token of the row in its shard
        "length": pl.Int64,  # T
        "prompt_length": pl.Int64,  # tokens before the answer
        "finish_reason": pl.String,
        "checksum": pl.UInt32,  # crc32 of id, prompt_length, finish_reason, features, last hidden, ids and mask
        "finite": pl.Boolean,
    }
)
MADE_BY = "extract_hiddens"


@dataclass(frozen=True)
class Row:
    """One row, unpadded, on the CPU."""

    id: str
    ids: Tensor  # [T] int32
    mask: Tensor  # [T] bool: the assistant's tokens
    features: Tensor  # [T, 3H]
    last: Tensor  # [T, H]
    prompt_length: int
    finish_reason: str


def row_bytes(hidden_size: int, dtype: torch.dtype) -> float:
    """Bytes a token takes on disk: 4H numbers, an int32 id, one bit."""
    return 4 * hidden_size * dtype.itemsize + 4 + 1 / 8


def write(folder: Path, rows: Iterable[Row], dtype: torch.dtype, shard_bytes: int) -> int:
    """Write rows in their order into shards of about `shard_bytes`; returns how many. The caller makes `folder` atomic."""
    entries: list[dict] = []
    pending: list[Row] = []
    size = 0.0

    def flush() -> None:
        nonlocal pending, size
        name = f"shard-{len({e['shard'] for e in entries}):05d}.safetensors"
        tensors, offset = _join(pending), 0
        save_file(tensors, folder / name)
        for row in pending:
            entries.append(_entry(row, name, offset))
            offset += len(row.ids)
        pending, size = [], 0

    for row in rows:
        row = Row(
            row.id, row.ids, row.mask, row.features.to(dtype), row.last.to(dtype), row.prompt_length, row.finish_reason
        )
        pending.append(row)
        size += len(row.ids) * row_bytes(row.last.shape[1], dtype)
        if size >= shard_bytes:
            flush()
    if pending:
        flush()
    pl.DataFrame(entries, schema=INDEX).write_parquet(folder / "index.parquet")
    return len(entries)


def read(folder: Path) -> Iterator[Row]:
    """Every row, in order, checked. Features come as float32.

    Raises ValueError naming the shard and the row, where a shard is missing, cut, altered, or holds NaN or infinity.
    """
    index = read_index(folder)
    for (name,), rows in index.group_by("shard", maintain_order=True):
        yield from _read_shard(folder / str(name), rows)


def read_index(folder: Path) -> pl.DataFrame:
    path = folder / "index.parquet"
    try:
        index = pl.read_parquet(path)
    except FileNotFoundError:
        raise ValueError(f"{path} not found; run: dvc repro {MADE_BY}") from None
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        raise ValueError(
            f"{path} is not readable Parquet ({error}); delete {folder} and run: dvc repro {MADE_BY}"
        ) from None
    if index.schema != INDEX:
        raise ValueError(f"{path} has columns {dict(index.schema)}, expected {dict(INDEX)}; run: dvc repro {MADE_BY}")
    return index


def _read_shard(path: Path, rows: pl.DataFrame) -> Iterator[Row]:
    try:
        with safe_open(path, framework="pt") as shard:
            tensors = {name: shard.get_tensor(name) for name in ("features", "last", "ids", "mask")}
    except (FileNotFoundError, SafetensorError, OSError) as error:
        raise broken(path, str(error)) from None
    mask = torch.from_numpy(np.unpackbits(tensors["mask"].numpy(), count=len(tensors["ids"])).astype(bool))
    for entry in rows.iter_rows(named=True):
        span = slice(entry["offset"], entry["offset"] + entry["length"])
        row = Row(
            entry["id"], tensors["ids"][span], mask[span], tensors["features"][span], tensors["last"][span],
            entry["prompt_length"], entry["finish_reason"],
        )  # fmt: skip
        check(row, entry, path.parent)
        yield Row(
            row.id, row.ids, row.mask, row.features.float(), row.last.float(), row.prompt_length, row.finish_reason
        )


def check(row: Row, entry: dict, folder: Path) -> None:
    """Raises ValueError naming the row, where it is not what its index entry says, or holds NaN or infinity."""
    path = folder / entry["shard"]
    if len(row.ids) != entry["length"] or _checksum(row) != entry["checksum"]:
        raise ValueError(f"{path}: row {entry['id']} does not match its checksum; {_repair(folder)}")
    if not entry["finite"]:
        raise ValueError(
            f"{path}: row {entry['id']} holds NaN or infinity, expected finite hidden states; set "
            "extract_hiddens.dtype or target.dtype to float32 and run: dvc repro extract_hiddens"
        )


def broken(shard: Path, found: str) -> ValueError:
    return ValueError(f"{shard} is missing or cut ({found}); {_repair(shard.parent)}")


def _repair(folder: Path) -> str:
    return f"delete {folder} and run: dvc repro {MADE_BY}"


def _join(rows: list[Row]) -> dict[str, Tensor]:
    bits = np.packbits(torch.cat([r.mask for r in rows]).numpy())
    return {
        "features": torch.cat([r.features for r in rows]),
        "last": torch.cat([r.last for r in rows]),
        "ids": torch.cat([r.ids for r in rows]),
        "mask": torch.from_numpy(bits),
    }


def _entry(row: Row, shard: str, offset: int) -> dict:
    finite = bool(torch.isfinite(row.features).all() and torch.isfinite(row.last).all())
    return {
        "id": row.id, "shard": shard, "offset": offset, "length": len(row.ids), "prompt_length": row.prompt_length,
        "finish_reason": row.finish_reason, "checksum": _checksum(row), "finite": finite,
    }  # fmt: skip


def _checksum(row: Row) -> int:
    total = zlib.crc32(repr((row.id, row.prompt_length, row.finish_reason)).encode())
    for tensor in (row.features, row.last, row.ids, row.mask):
        total = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy(), total)
    return total


def digest(folder: Path) -> str:
    """A short name of the whole content, from the index's checksums: what a resumed run compares."""
    index = read_index(folder)
    return f"{zlib.crc32(index.write_csv().encode()):08x}"
