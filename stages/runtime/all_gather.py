"""All-gather JSON values over the processes of torchrun."""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from stages.runtime.distributed import RankContext


def all_gather_json(group: RankContext, mine: list[Any]) -> list[Any]:
    """Return the lists of all ranks, concatenated in the order of ranks. Blocks until every rank has called it."""
    if group.world == 1:
        return mine
    text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8).to(group.device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=group.device) for _ in range(group.world)]
    dist.all_gather(sizes, torch.tensor([len(text)], device=group.device))
    most = max(int(size) for size in sizes)
    padded = [text.new_zeros(most) for _ in sizes]
    dist.all_gather(padded, F.pad(text, (0, most - len(text))))
    parts = [part[: int(size)].cpu().numpy().tobytes() for part, size in zip(padded, sizes, strict=True)]
    return [one for part in parts for one in json.loads(part)]
