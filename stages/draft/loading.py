"""Loading of a trained draft, EAGLE-3 or block, ready to decode or to be replayed."""

from pathlib import Path
from typing import Any

import torch

from stages.draft import block_checkpoint, checkpoint
from stages.draft.block_draft import BlockDraft, BlockDraftConfig
from stages.draft.eagle3 import Eagle3Draft
from stages.params import schema
from stages.runtime import atomic


def load_draft(
    p: schema.Params, checkpoint_name: str, device: str, dtype: torch.dtype
) -> tuple[Eagle3Draft, dict[str, Any]]:
    """Return a checkpoint's draft without gradients, and its config.json. Raises ValueError as `checkpoint.read_draft`."""
    folder, made_by = checkpoint.locate_checkpoint(checkpoint_name), p.get_making_stage(checkpoint_name)
    config, tensors = checkpoint.read_draft(folder, made_by)
    return Eagle3Draft.from_checkpoint(config, tensors).to(device, dtype).requires_grad_(False), config


def load_block_draft(
    p: schema.Params, checkpoint_name: str, device: str, dtype: torch.dtype
) -> tuple[BlockDraft, BlockDraftConfig]:
    """Return a block draft without gradients, and its sizes. Raises ValueError as `block_checkpoint.read_block_draft`."""
    folder, made_by = checkpoint.locate_checkpoint(checkpoint_name), p.get_making_stage(checkpoint_name)
    config, tensors = block_checkpoint.read_block_draft(folder, made_by)
    sizes = block_checkpoint.parse_block_config(config)
    draft = BlockDraft(sizes)
    draft.load_state_dict(tensors)
    return draft.to(device, dtype).requires_grad_(False), sizes


def is_block_draft(folder: Path, made_by: str) -> bool:
    """Return whether `folder`/draft/config.json names a block draft. Raises ValueError where it is missing or broken."""
    config = atomic.read_json(folder / "draft" / "config.json", made_by)
    return config.get("architectures") in [[name] for name in block_checkpoint.ARCHITECTURES.values()]
