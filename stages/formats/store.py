"""Hidden states at random access, as training reads them: any row, when it is its turn, as views of the mapped shards.

Nothing is read whole; a row's checksum is compared the first time it is read.
"""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from stages.formats import hiddens


class Store:
    """The rows of one split, by their number in the index. Several threads may read at a time."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._index = hiddens.read_index(folder)
        self.lengths: list[int] = self._index["length"].to_list()
        self._rows = self._index.to_dicts()
        self._seen: set[int] = set()
        self._shards: dict[str, tuple[Any, torch.Tensor, torch.Tensor]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int) -> hiddens.Row:
        """In the dtype it is stored in. Raises ValueError as hiddens.read does."""
        entry = self._rows[number]
        shard, ids, mask = self._shard(entry["shard"])
        span = slice(entry["offset"], entry["offset"] + entry["length"])
        try:
            features, last = (shard.get_slice(name)[span] for name in ("features", "last"))
        except (SafetensorError, OSError) as error:
            raise hiddens.broken(self.folder / entry["shard"], str(error)) from None
        row = hiddens.Row(
            entry["id"], ids[span], mask[span], features, last, entry["prompt_length"], entry["finish_reason"]
        )
        if number not in self._seen:
            hiddens.check(row, entry, self.folder)
            self._seen.add(number)
        return row

    def _shard(self, name: str) -> tuple[Any, torch.Tensor, torch.Tensor]:
        with self._lock:
            if name not in self._shards:
                try:
                    shard = safe_open(self.folder / name, framework="pt")
                    ids, bits = shard.get_tensor("ids"), shard.get_tensor("mask")
                except (FileNotFoundError, SafetensorError, OSError) as error:
                    raise hiddens.broken(self.folder / name, str(error)) from None
                mask = torch.from_numpy(np.unpackbits(bits.numpy(), count=len(ids)).astype(bool))
                self._shards[name] = shard, ids, mask
            return self._shards[name]
