"""Room for hidden states between where they are made and where they are written: two of these, and neither waits.

While one batch is copied to the host and written from there, the next is computed into the other.

Letters: N tokens, M pieces of pictures, H hidden size.
"""

from typing import Any

import torch
from torch import Tensor

from stages.hidden_states import format
from stages.hidden_states.format import StoredHiddenStates

LAST_HIDDEN_PART = (
    format.NUM_FEATURE_LAYERS
)  # the number of the last hidden among the parts of a token: low, mid, high, last


class StagingBuffer:
    """Room for one batch: on the device, where parts are put, and on the host, where threads sum and write them."""

    def __init__(
        self, tokens: int, pieces: int, hidden_size: int, dtype: torch.dtype, sees: bool, device: torch.device
    ) -> None:
        """For so many tokens at most, and of a target that sees, so many pieces of pictures."""
        self.tokens, self.pieces, self.device = 0, 0, device
        on_gpu = device.type == "cuda"
        self._there = _allocate_buffer(tokens, pieces, hidden_size, dtype, sees, device=device)
        self._here = (
            _allocate_buffer(tokens, pieces, hidden_size, dtype, sees, pin_memory=True) if on_gpu else self._there
        )
        self._copied = torch.cuda.Event() if on_gpu else None

    def keep(self, part: int, numbers: Tensor) -> None:
        """Part low, mid, high or LAST of all tokens [N, H], as it will be stored."""
        block = self._there[0]
        count, width = numbers.shape
        stored, scale = format.encode_numbers(numbers, block.last.dtype)
        columns = slice(0, width) if part == LAST_HIDDEN_PART else slice(part * width, (part + 1) * width)
        (block.last if part == LAST_HIDDEN_PART else block.features)[:count, columns].copy_(stored)
        scales = block.last_scale if part == LAST_HIDDEN_PART else block.features_scale
        if scale is not None and scales is not None:
            scales[:count, 0 if part == LAST_HIDDEN_PART else part].copy_(scale[:, 0])
        self.tokens = count

    def see(self, positions: Tensor, visual: Tensor) -> None:
        """Of a target that sees, the positions [N, 3] of all tokens, and the embeddings [M, H] of pictures' pieces."""
        block, self.pieces = self._there[0], len(visual)
        stored, scale = format.encode_numbers(visual, block.last.dtype)
        for room, tensor in ((block.positions, positions), (block.visual, stored), (block.visual_scale, scale)):
            if room is not None and tensor is not None:
                room[: len(tensor)].copy_(tensor)

    def put(self, block: StoredHiddenStates) -> None:
        """All parts at once, as they are stored."""
        self.tokens, self.pieces = len(block.features), 0 if block.visual is None else len(block.visual)
        room = self._used(self._there[0]).tensors()
        for name, tensor in block.tensors().items():
            room[name].copy_(tensor)

    def _used(self, block: StoredHiddenStates) -> StoredHiddenStates:
        return block.part(slice(self.tokens), slice(self.pieces))

    def send(self, side: "torch.cuda.Stream | None") -> None:
        """Start the copy to the host, beside the next forward; from now on the slot is the writer's."""
        n, finite, block = self.tokens, self._there[1], self._used(self._there[0])
        finite[:n].copy_(format.find_finite_tokens(block))
        if side is None or self._copied is None:
            return
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            here = self._used(self._here[0]).tensors()
            for name, tensor in block.tensors().items():
                here[name].copy_(tensor, non_blocking=True)
            self._here[1][:n].copy_(finite[:n], non_blocking=True)
            self._copied.record(side)

    def host(self) -> tuple[StoredHiddenStates, Tensor]:
        """What was sent, and of each token whether it is finite; waits for the copy."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._used(self._here[0]), self._here[1][: self.tokens]


def _allocate_buffer(
    tokens: int, pieces: int, hidden_size: int, dtype: torch.dtype, sees: bool, **where: Any
) -> tuple[StoredHiddenStates, Tensor]:
    shapes = {
        "features": (tokens, format.NUM_FEATURE_LAYERS * hidden_size, dtype),
        "last": (tokens, hidden_size, dtype),
    }
    scales = {
        "features_scale": (tokens, format.NUM_FEATURE_LAYERS, torch.float32),
        "last_scale": (tokens, 1, torch.float32),
    }
    if sees:
        shapes |= {"positions": (tokens, 3, torch.int32), "visual": (pieces, hidden_size, dtype)}
        scales["visual_scale"] = (pieces, 1, torch.float32)
    if dtype == format.FP8:
        shapes |= scales
    block = StoredHiddenStates(
        **{name: torch.empty(n, width, dtype=kind, **where) for name, (n, width, kind) in shapes.items()}
    )
    return block, torch.empty(tokens, dtype=torch.bool, **where)
