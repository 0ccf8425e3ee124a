"""Build the inputs of a multimodal target beside its tokens: pixels and three-axis rotary positions.

A multimodal target replaces the embeddings of image tokens by the images' own and, in Qwen3-VL, adds to the first residual
streams (deepstack). Its `get_rope_index` gives each token's position on three axes.

Letters: T tokens of one document, N tokens of several documents end to end, P patches, D numbers in a patch, I images.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ImagePatches:
    """Images end to end, in the order of a document's tokens, as Qwen-VL's keyword arguments of the same names."""

    pixel_values: Tensor  # [P, D] float32
    image_grid_thw: Tensor  # [I, 3] int64: frames, rows and columns of patches


@dataclass(frozen=True)
class MultimodalInputs:
    """Inputs of documents end to end beside their tokens, on the CPU."""

    positions: Tensor  # [3, N] int64: rotary positions, each document's from 0
    image_token_mask: Tensor  # [N] bool
    pixel_values: Tensor | None  # [P, D] of all images
    image_grid_thw: Tensor | None  # [I, 3]


def is_multimodal(model: "PreTrainedModel") -> bool:
    """Return whether this target takes pixels and positions on three axes."""
    return hasattr(model.base_model, "get_rope_index")


def build_multimodal_inputs(
    model: "PreTrainedModel", names: Sequence[str], documents: Sequence[Tensor], images: Sequence[ImagePatches | None]
) -> MultimodalInputs:
    """Return the inputs of documents, ids [T] on the CPU each, with the patches of each one's images.

    Positions are the target's own. Raises ValueError naming a document whose image tokens and image embeddings differ in
    number.
    """
    base_model: Any = model.base_model
    image_token_id, merge_size = model.config.image_token_id, model.config.vision_config.spatial_merge_size
    positions, masks = [], []
    for name, ids, patches in zip(names, documents, images, strict=True):
        mask = ids == image_token_id
        grid = None if patches is None else patches.image_grid_thw
        expected = 0 if grid is None else int(grid.prod(-1).sum()) // merge_size**2
        if int(mask.sum()) != expected:
            raise ValueError(
                f"{name} has {int(mask.sum())} image tokens (id {image_token_id}), expected {expected} for its "
                f"{0 if grid is None else len(grid)} images; sample it again: dvc repro -f -s sample_target"
            )
        rope_index, _ = base_model.get_rope_index(
            ids[None].long(), mm_token_type_ids=mask[None].int(), image_grid_thw=grid
        )
        positions.append(rope_index[:, 0])
        masks.append(mask)
    present = [patches for patches in images if patches is not None]
    return MultimodalInputs(
        torch.cat(positions, dim=1),
        torch.cat(masks),
        torch.cat([patches.pixel_values for patches in present]) if present else None,
        torch.cat([patches.image_grid_thw for patches in present]) if present else None,
    )


def build_pixel_kwargs(model: "PreTrainedModel", inputs: MultimodalInputs) -> dict[str, Tensor]:
    """Return the images as keyword arguments of the model's forward, on its device."""
    if inputs.pixel_values is None or inputs.image_grid_thw is None:
        return {}
    return {
        "pixel_values": copy_to_device(inputs.pixel_values, model.device),
        "image_grid_thw": copy_to_device(inputs.image_grid_thw, model.device),
    }


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to `device` without waiting for its queued work."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
