"""Rows packed end to end, without padding: the part of a pack that every objective shares.

An objective (`PackObjective`) adds what is supervised: ttt.TrainingPack for EAGLE-3, EAGLE and Medusa, BlockPack for block
drafts (families/block/objective.py). Its loss has L steps: those of the training-time test, or the drafts of a block.
Letters: T tokens of a pack, K feature layers, H hidden, M image tokens, L steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn


class PackRow(Protocol):
    """A row with hidden states; of a multimodal target also positions [t, 3], image_token_mask [t], image_embeddings [m, H]."""

    @property
    def ids(self) -> Tensor: ...  # [t]
    @property
    def features(self) -> Tensor: ...  # [t, KH]
    @property
    def last(self) -> Tensor: ...  # [t, H]
    @property
    def mask(self) -> Tensor: ...  # [t] bool: assistant tokens


class PackIndex(NamedTuple):
    """The index of a pack in training, the same for any number of processes and after a resume."""

    epoch: int
    step: int  # of the epoch
    pack: int  # of the step

    def seed_generator(self, seed: int) -> torch.Generator:
        """Return a generator of what is drawn for this pack, by train_draft.seed."""
        # torch's generator uses 32 bits of a seed: SeedSequence mixes all four numbers into them
        (mixed,) = np.random.SeedSequence((seed, *self)).generate_state(1).tolist()
        return torch.Generator().manual_seed(mixed)


@dataclass(kw_only=True)
class PackedRows:
    """Concatenated rows."""

    ids: Tensor  # [T] int64
    features: Tensor  # [T, KH]; [T, 0] until an online target fills it
    last: Tensor  # [T, H] the target's last hidden state, after its final norm
    row_index: Tensor  # [T] int64
    position: Tensor  # [T] int64: of a token in its row
    lengths: list[int]  # of its rows
    rope_positions: Tensor | None = None  # [T, 3]; this and the following for multimodal targets
    image_embeddings: Tensor | None = None  # [M, H]
    image_token_index: Tensor | None = None  # [T] int64: index into image_embeddings, -1 for text
    multimodal_inputs: Any = None  # target.multimodal.MultimodalInputs, for an online target

    @classmethod
    def concatenate(cls, rows: Sequence[PackRow], pinned: bool = False) -> "PackedRows":
        """Concatenate rows on the CPU, in pinned memory for a GPU."""
        lengths = torch.tensor([len(r.ids) for r in rows])
        row_index = torch.arange(len(rows)).repeat_interleave(lengths)
        return PackedRows(
            ids=torch.cat([r.ids for r in rows]).to(torch.int64),
            features=_concatenate([r.features for r in rows], pinned),
            last=_concatenate([r.last for r in rows], pinned),
            row_index=row_index,
            position=torch.arange(len(row_index)) - (lengths.cumsum(0) - lengths)[row_index],
            lengths=lengths.tolist(),
            **_pack_multimodal(rows, pinned),
        )

    def to(self, device: torch.device | str) -> Self:
        """Copy to a device, without waiting where the memory is pinned."""
        return replace(self, **{name: t.to(device, non_blocking=True) for name, t in self.tensors()})

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the allocator from reusing the GPU memory before `stream` has passed this point."""
        for _, tensor in self.tensors():
            tensor.record_stream(stream)

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Return the fields that are tensors, by name."""
        return [(name, value) for name, value in vars(self).items() if isinstance(value, Tensor)]


@dataclass(kw_only=True)
class SupervisedPack(PackedRows):
    """A pack, and how much of it is supervised."""

    supervised_per_step: list[int]  # L
    num_candidates: int  # positions that could be supervised at the first step
    contexts: Tensor  # [P] int64: range of the tokens before the first step's draft; len(CONTEXT_EDGES): not supervised
    padded_size: int | None = None  # packs of one such size, and one number of tokens, differ in no other size

    def count_supervised(self) -> Tensor:
        """Return the supervised positions of each step [L], on the pack's device."""
        return torch.tensor(self.supervised_per_step, device=self.ids.device)

    def without_supervision(self) -> Self:
        """Return the same rows with no supervised position."""
        raise NotImplementedError


class PackObjective(Protocol):
    """A definition of what is learned from a pack; immutable."""

    @property
    def num_steps(self) -> int: ...  # L

    def build_pack(self, rows: Sequence[PackRow], pack_index: PackIndex, pinned: bool) -> SupervisedPack:
        """Build a pack on the CPU, in pinned memory for a GPU."""
        ...

    def combine_losses(self, step_loss: Sequence[float], counts: Sequence[float]) -> float:
        """Return the loss of an epoch from the mean loss and the number of supervised positions of each step."""
        ...


@dataclass
class LossOutput:
    """Loss and accuracy of a pack, on its device."""

    total_loss: Tensor  # scalar for backward; those of a step's packs add up to the step's objective
    loss_per_step: Tensor  # [L] summed over supervised positions
    argmax_matches: Tensor  # [L, P] bool: the draft's argmax is the label; False where not supervised


def compute_zero_loss(draft: nn.Module, pack: PackedRows, num_steps: int) -> LossOutput:
    """Return the loss of a pack without supervised positions, with a zero gradient for every weight."""
    total = torch.stack([p.sum() * 0 for p in draft.parameters()]).sum()
    return LossOutput(total, pack.last.new_zeros(num_steps), pack.ids.new_zeros(num_steps, 0).bool())


def number_image_tokens(image_token_mask: Tensor) -> Tensor:
    """Number the image tokens of mask [T] from 0; -1 for text tokens."""
    return torch.where(image_token_mask, image_token_mask.cumsum(0) - 1, -1)


def _pack_multimodal(rows: Sequence[Any], pinned: bool) -> dict[str, Tensor]:
    """Return the fields of a pack that only rows of a multimodal target have; an empty dict for text."""
    if getattr(rows[0], "positions", None) is None:
        return {}
    image_token_mask = torch.cat([r.image_token_mask for r in rows])
    return {
        "rope_positions": torch.cat([r.positions for r in rows]),
        "image_embeddings": _concatenate([r.image_embeddings for r in rows], pinned),
        "image_token_index": number_image_tokens(image_token_mask),
    }


def _concatenate(parts: list[Tensor], pinned: bool) -> Tensor:
    joined = torch.empty(sum(map(len, parts)), *parts[0].shape[1:], dtype=parts[0].dtype, pin_memory=pinned)
    return torch.cat(parts, out=joined)
