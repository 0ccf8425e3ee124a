"""Rotary frequencies of a draft, from its target's rope_parameters."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from stages.target.config_facts import assign_frequency_axes


def compute_inverse_frequency(rope: dict[str, Any], head_dim: int) -> Tensor:
    """Return RoPE frequencies 1/theta**(2i/E) in float32, [E/2], with the target's scaling.

    They must never be rounded to bfloat16, as SpecForge did at one time: cosines were then wrong by up to 2.
    Raises ValueError for a rope_type that is not implemented.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequency = 1.0 / (float(rope["rope_theta"]) ** exponents)
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return frequency
    if kind == "linear":
        return frequency / rope["factor"]
    if kind == "llama3":  # Llama 3.1: scale long wavelengths, keep short ones, interpolate between
        low, high, old = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
        rotations = old * frequency / (2 * math.pi)
        ramp = ((rotations - low) / (high - low)).clamp(0, 1)
        return frequency * (ramp + (1 - ramp) / rope["factor"])
    if kind == "dynamic" and rope.get("alpha"):  # Hunyuan: one scaled base for all lengths
        return 1.0 / ((float(rope["rope_theta"]) * rope["alpha"] ** (head_dim / (head_dim - 2))) ** exponents)
    raise ValueError(
        f"rope_type {kind!r} is not supported by a draft, expected default, linear, llama3, or dynamic with an alpha; of an "
        "imported draft, choose another; of a target, give its draft RoPE of its own: init_draft.draft_config_path names a "
        "JSON file in "
        f'draft_configs/ with {{"rope_theta": {rope["rope_theta"]}, "rope_scaling": null}}'
    )


class RotaryModule(nn.Module):
    """A module with RoPE frequencies [E/2] that stay in float32 where it is cast: rounding to bfloat16 makes angles wrong."""

    inverse_frequency: Tensor

    def register_rope(self, rope: dict[str, Any], head_dim: int) -> None:
        self._rope = rope, head_dim
        self.register_buffer("inverse_frequency", compute_inverse_frequency(rope, head_dim), persistent=False)

    def _apply(self, fn, recurse=True):
        """Move and cast as any module, but for the frequencies, which are computed again."""
        super()._apply(fn, recurse)
        self.inverse_frequency = compute_inverse_frequency(*self._rope).to(self.inverse_frequency.device)
        return self


def check_rope(rope: dict[str, Any], head_dim: int) -> None:
    """Raise ValueError for rope_parameters that a draft with heads of this width can't have."""
    compute_inverse_frequency(rope, head_dim)
    assign_frequency_axes(rope, head_dim)
