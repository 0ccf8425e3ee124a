"""Assign the frequencies of multimodal RoPE to its three axes: time, height and width.

A multimodal target's image tokens have positions in the image; text tokens have equal positions on all axes.
`mrope_section`, three counts that add up to E/2, assigns frequencies to axes in one of two ways:

    chunked, Qwen2.5-VL     [2, 1, 1]  ->  t t h w       one section after the other
    interleaved, Qwen3-VL   [2, 1, 1]  ->  t h w t       alternating while height and width last; the rest is time's

Letters: E head width.
"""

from typing import Any

import torch
from torch import Tensor


def assign_frequency_axes(rope: dict[str, Any], head_dim: int) -> Tensor | None:
    """Return the axis (0, 1, 2) of each frequency, [E/2] int64; None without `mrope_section`."""
    section = rope.get("mrope_section")
    if section is None:
        return None
    if len(section) != 3 or sum(section) != head_dim // 2:
        raise ValueError(
            f"the target's mrope_section is {section}, expected three counts that add up to {head_dim // 2}, half of "
            f"head_dim {head_dim}; correct rope_parameters in its config.json, or for a class that rotates a part of each head "
            f"give the draft heads of that width: init_draft.draft_config_path names a JSON file in draft_configs/ with "
            f'{{"head_dim": {2 * sum(section)}}}'
        )
    if not rope.get("mrope_interleaved", False):
        return torch.arange(3).repeat_interleave(torch.tensor(section))
    found = torch.zeros(head_dim // 2, dtype=torch.int64)
    for axis in (1, 2):
        found[axis : 3 * section[axis] : 3] = axis
    return found
