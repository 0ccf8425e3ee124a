"""Hidden states at random access, as training reads them: any row, when it is its turn, as views of the mapped shards.

Nothing is read whole; a row's checksum is compared the first time it is read.
"""

import threading
from pathlib import Path
from typing import Any

import torch

from stages.hidden_states import format


class HiddenStatesReader:
    """The rows of one split, by their number in the index. Several threads may read at a time.

    `online`: they have tokens and masks only; the reader is to make the hidden states (see extract_hiddens.online).
    """

    def __init__(self, folder: Path):
        self.folder = folder
        index = format.read_index(folder)
        self.lengths: list[int] = index["length"].to_list()
        self._entries = index.to_dicts()
        self._known: set[int] = set()
        self._shards: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self.online = bool(self._entries) and format.read_hidden_size(folder / self._entries[0]["shard"]) == 0

    def __len__(self) -> int:
        return len(self._entries)

    def row(self, number: int, dtype: torch.dtype) -> format.HiddenStatesRow:
        """In the dtype it is stored in, fp8 as `dtype`. Raises ValueError as hiddens.read does."""
        entry = self._entries[number]
        path = self.folder / entry["shard"]
        with self._lock:
            shard = self._shards[path.name] = self._shards.get(path.name) or format.open_shard(path)
        head, block = format.read_row(path, entry, shard, known=number in self._known)
        self._known.add(number)
        return format.decode_row(head, block, block.last.dtype if block.last_scale is None else dtype)
