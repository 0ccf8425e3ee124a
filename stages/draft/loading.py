"""Loading of a trained draft, of EAGLE-3 or of blocks, ready to decode or to be replayed."""

from typing import Any, NamedTuple

import torch

from stages.draft import block_checkpoint, checkpoint, eagle3_checkpoint
from stages.draft.block_draft import BlockDraft
from stages.draft.eagle3 import Eagle3Draft
from stages.params import schema


class LoadedDraft(NamedTuple):
    """A draft of EAGLE-3, or a block draft."""

    draft: Eagle3Draft | BlockDraft
    feature_layers: list[int]  # of the target, that it reads
    config: dict[str, Any]  # config.json


def load_eagle3_draft(
    p: schema.Params, checkpoint_name: str, device: str, dtype: torch.dtype
) -> tuple[Eagle3Draft, dict[str, Any]]:
    """Return an EAGLE-3 checkpoint's draft without gradients, and its config.json.

    Raises ValueError as `eagle3_checkpoint.read_eagle3_draft`.
    """
    folder, made_by = checkpoint.locate_checkpoint(checkpoint_name), p.get_making_stage(checkpoint_name)
    config, tensors = eagle3_checkpoint.read_eagle3_draft(folder, made_by)
    return Eagle3Draft.from_checkpoint(config, tensors).to(device, dtype).requires_grad_(False), config


def load_block_draft(
    p: schema.Params, checkpoint_name: str, device: str, dtype: torch.dtype
) -> tuple[BlockDraft, dict[str, Any]]:
    """Return a checkpoint's block draft without gradients, and its config.json; `BlockDraft.config` is the same, parsed.

    Raises ValueError as `block_checkpoint.read_block_draft`.
    """
    folder, made_by = checkpoint.locate_checkpoint(checkpoint_name), p.get_making_stage(checkpoint_name)
    config, tensors = block_checkpoint.read_block_draft(folder, made_by)
    draft = BlockDraft(block_checkpoint.parse_block_config(config))
    draft.load_state_dict(tensors)
    return draft.to(device, dtype).requires_grad_(False), config


def load_draft(
    p: schema.Params, checkpoint_name: str, device: str, dtype: torch.dtype, num_target_layers: int
) -> LoadedDraft:
    """Return a checkpoint's draft, of the family that config.json names. Raises ValueError as the others."""
    if block_checkpoint.is_block_draft(checkpoint.locate_checkpoint(checkpoint_name)):
        block, config = load_block_draft(p, checkpoint_name, device, dtype)
        return LoadedDraft(block, list(block.config.feature_layers), config)
    draft, config = load_eagle3_draft(p, checkpoint_name, device, dtype)
    return LoadedDraft(draft, eagle3_checkpoint.read_feature_layers(config, num_target_layers), config)
