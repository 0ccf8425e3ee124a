"""Inputs of a multimodal target beside its tokens: pixels and three-axis rotary positions.

A multimodal target is called where it takes pixels: it puts the images' embeddings in their tokens' place and, in Qwen3-VL,
adds to the first residual streams (deepstack). Its own `get_rope_index` gives each token's position on three axes.

Letters: T tokens of one document, N tokens of several documents end to end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
)


class ImagePatchesProtocol(Protocol):
    """Of one document, in the order of its tokens (`build_pixel_kwargs.Pixels`)."""

    @property
    def values(self) -> Tensor: ...  # [patches, D]

    @property
    def grid(self) -> Tensor: ...  # [images, 3] patches in time, height and width


@dataclass(frozen=True)
class MultimodalInputs:
    """What documents end to end hold beside their tokens, on the CPU."""

    positions: Tensor  # [3, N] int64: rotary positions, each document's from 0
    pictured: Tensor  # [N] bool: tokens that stand for a piece of a picture
    values: Tensor | None  # [patches, D] of all pictures
    grid: Tensor | None  # [images, 3]


def is_multimodal(model: PreTrainedModel) -> bool:
    """Whether this target is entered with pixels, and with positions on three axes."""
    return hasattr(model.base_model, "get_rope_index")


def build_multimodal_inputs(
    model: PreTrainedModel,
    names: Sequence[str],
    documents: Sequence[Tensor],
    pictures: Sequence[ImagePatchesProtocol | None],
) -> MultimodalInputs:
    """Documents, ids [T] on the CPU each, with the pictures of each -> what the target is given of them.

    Positions are the target's own. Raises ValueError naming a document that has not one token for each embedding.
    """
    whole: Any = model.base_model
    token, merge = model.config.image_token_id, model.config.vision_config.spatial_merge_size
    positions, pictured = [], []
    for name, ids, shown in zip(names, documents, pictures, strict=True):
        pieces = ids == token
        needed = 0 if shown is None else int(shown.grid.prod(-1).sum()) // merge**2
        if int(pieces.sum()) != needed:
            raise ValueError(
                f"{name} has {int(pieces.sum())} tokens {token} for pictures' pieces, expected {needed} for its "
                f"{0 if shown is None else len(shown.grid)} pictures; sample it again: dvc repro -f -s sample_target"
            )
        where, _ = whole.get_rope_index(
            ids[None].long(), mm_token_type_ids=pieces[None].int(), image_grid_thw=None if shown is None else shown.grid
        )
        positions.append(where[:, 0])
        pictured.append(pieces)
    all_shown = [shown for shown in pictures if shown is not None]
    return MultimodalInputs(
        torch.cat(positions, dim=1),
        torch.cat(pictured),
        torch.cat([shown.values for shown in all_shown]) if all_shown else None,
        torch.cat([shown.grid for shown in all_shown]) if all_shown else None,
    )


def build_pixel_kwargs(model: PreTrainedModel, view: MultimodalInputs) -> dict[str, Tensor]:
    """The view's pictures under the names by which the model takes them."""
    if view.values is None or view.grid is None:
        return {}
    return {
        "pixel_values": copy_to_device(view.values, model.device),
        "image_grid_thw": copy_to_device(view.grid, model.device),
    }


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The same on `device`, without waiting for what the device has still to do."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
