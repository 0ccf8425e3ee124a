"""Rotary frequencies of a draft, from its target's rope_parameters."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from stages.target.config_facts import assign_frequency_axes


def compute_frequencies(rope: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """Return RoPE frequencies 1/theta**(2i/E) in float32, [E/2], with the target's scaling, and the factor of cos and sin.

    They must never be rounded to bfloat16, as SpecForge did at one time: cosines were then wrong by up to 2.
    Raises ValueError for a rope_type that is not implemented.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequency = 1.0 / (float(rope["rope_theta"]) ** exponents)
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return frequency, 1.0
    if kind == "linear":
        return frequency / rope["factor"], 1.0
    if kind == "llama3":  # Llama 3.1: scale long wavelengths, keep short ones, interpolate between
        low, high, old = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
        rotations = old * frequency / (2 * math.pi)
        ramp = ((rotations - low) / (high - low)).clamp(0, 1)
        return frequency * (ramp + (1 - ramp) / rope["factor"]), 1.0
    if kind == "yarn":
        kept = 1 - _find_yarn_ramp(rope, head_dim)
        return frequency * (kept + (1 - kept) / rope["factor"]), _compute_yarn_scale(rope)
    if kind == "dynamic" and rope.get("alpha"):  # Hunyuan: one scaled base for all lengths
        return 1.0 / ((float(rope["rope_theta"]) * rope["alpha"] ** (head_dim / (head_dim - 2))) ** exponents), 1.0
    raise ValueError(
        f"rope_type {kind!r} is not supported by a draft, expected default, linear, llama3, yarn, or dynamic with an alpha; "
        "choose another draft, or give the target's one RoPE of its own: init_draft.draft_config_path names a JSON file in "
        f'draft_configs/ with {{"rope_theta": {rope["rope_theta"]}, "rope_scaling": null}}'
    )


def _find_yarn_ramp(rope: dict[str, Any], head_dim: int) -> Tensor:
    """Return how much of each frequency [E/2] YaRN scales: none of short wavelengths, all of long ones (arXiv 2309.00071)."""

    def find_index(rotations: float) -> float:  # of the frequency that turns so often in the original context
        length = rope["original_max_position_embeddings"]
        return head_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(float(rope["rope_theta"])))

    low, high = find_index(rope.get("beta_fast") or 32), find_index(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (max(high - low, 0) or 0.001)).clamp(0, 1)


def _compute_yarn_scale(rope: dict[str, Any]) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1.0)


class RotaryModule(nn.Module):
    """A module with RoPE frequencies [E/2] that stay in float32 where it is cast: rounding to bfloat16 makes angles wrong."""

    inverse_frequency: Tensor

    def register_rope(self, rope: dict[str, Any], head_dim: int) -> None:
        """Raise ValueError as `check_rope`."""
        check_rope(rope, head_dim)
        self._rope = rope, head_dim
        frequencies, self.rope_scale = compute_frequencies(rope, head_dim)
        self.register_buffer("inverse_frequency", frequencies, persistent=False)

    def _apply(self, fn, recurse=True):
        """Move and cast as any module, but for the frequencies, which are computed again."""
        super()._apply(fn, recurse)
        self.inverse_frequency = compute_frequencies(*self._rope)[0].to(self.inverse_frequency.device)
        return self

    def compute_cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin [..., 1, E/2] for positions [..., 1 or E/2], one or one a frequency; angles are float32."""
        angles = positions[..., None, :].to(torch.float32) * self.inverse_frequency
        cos, sin = angles.cos(), angles.sin()
        if self.rope_scale != 1:
            cos, sin = cos * self.rope_scale, sin * self.rope_scale
        return cos.to(dtype), sin.to(dtype)


def check_rope(rope: dict[str, Any], head_dim: int) -> None:
    """Raise ValueError for rope_parameters that a draft with heads of this width can't have."""
    try:
        with torch.device("cpu"):  # also where a module is built without memory
            frequencies = compute_frequencies(rope, head_dim)[0]
    except (KeyError, TypeError, ArithmeticError) as error:
        raise ValueError(f"rope_parameters are {rope!r:.200}, which give no frequencies ({error!r})") from None
    if not bool(torch.isfinite(frequencies).all()):
        raise ValueError(f"rope_parameters are {rope!r:.200}, expected finite frequencies")
    assign_frequency_axes(rope, head_dim)
