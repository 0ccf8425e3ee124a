"""Loading of a trained EAGLE-3 draft, ready to decode or to be replayed."""

from typing import Any

import torch

from stages.draft import checkpoint
from stages.draft.eagle3 import Eagle3Draft
from stages.params import schema


def load_draft(
    p: schema.Params, checkpoint_name: str, device: str, dtype: torch.dtype
) -> tuple[Eagle3Draft, dict[str, Any]]:
    """Return a checkpoint's draft without gradients, and its config.json. Raises ValueError as `checkpoint.read_draft`."""
    folder, made_by = checkpoint.locate_checkpoint(checkpoint_name), p.get_making_stage(checkpoint_name)
    config, tensors = checkpoint.read_draft(folder, made_by)
    return Eagle3Draft.from_checkpoint(config, tensors).to(device, dtype).requires_grad_(False), config
