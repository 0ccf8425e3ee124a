"""Answers to be replayed: rows of hidden states, padded into one batch.

Letters: B rows, T tokens, K feature layers, H hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from stages.draft.eagle3 import MultimodalFeatures
from stages.hidden_states.format import HiddenStatesRow


@dataclass(frozen=True)
class ReplayBatch:
    """Rows of hidden states, padded on the right."""

    ids: Tensor  # [B, T] prompt and answer
    features: Tensor  # [B, T, K*H]
    starts: Tensor  # [B] index of each answer's first token
    ends: Tensor  # [B] index after its last
    multimodal: MultimodalFeatures | None = None  # of a multimodal target
    last: Tensor | None = None  # [B, T, H] after the final norm, where it is asked for
    names: Sequence[str] = ()  # of the rows

    @classmethod
    def collate(cls, rows: list[HiddenStatesRow], device: torch.device, keeps_last: bool = False) -> "ReplayBatch":
        return cls(
            ids=pad_sequence([r.ids.to(torch.int64) for r in rows], batch_first=True).to(device),
            features=pad_sequence([r.features for r in rows], batch_first=True).to(device),
            starts=torch.tensor([r.prompt_length for r in rows], device=device),
            ends=torch.tensor([len(r.ids) for r in rows], device=device),
            multimodal=_collate_multimodal(rows, device),
            last=pad_sequence([r.last for r in rows], batch_first=True).to(device) if keeps_last else None,
            names=[r.id for r in rows],
        )


def _collate_multimodal(rows: list[HiddenStatesRow], device: torch.device) -> MultimodalFeatures | None:
    """Collate the rows' multimodal features; None for a text target."""
    positions, pictured, visual = zip(
        *((r.positions, r.image_token_mask, r.image_embeddings) for r in rows), strict=True
    )
    if positions[0] is None:
        return None
    positions, pictured = (pad_sequence(list(t), batch_first=True) for t in (positions, pictured))
    return MultimodalFeatures(positions.to(device), pictured.to(device), torch.cat(visual).to(device))
