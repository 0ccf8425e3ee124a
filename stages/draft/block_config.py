"""Sizes, layout and heads of a block draft, apart from the model: files and servers need these, and no tensors."""

from dataclasses import dataclass
from typing import Any

LAYOUTS = ("dflash", "dspark")


@dataclass(frozen=True)
class BlockDraftConfig:
    """Sizes and heads of a block draft. `block_checkpoint` converts it to and from config.json."""

    hidden_size: int  # H, the target's
    intermediate_size: int
    num_hidden_layers: int  # L
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # V, the target's
    max_position_embeddings: int
    rms_norm_eps: float
    rope: dict[str, Any]  # rope_parameters: rope_theta, rope_type, ...
    layout: str  # one of LAYOUTS
    block_size: int  # B
    mask_token_id: int
    feature_layers: tuple[int, ...]  # the residual stream entering block i of the target, strictly increasing
    markov_rank: int = 0  # r; dspark alone
    confidence_head: bool = False  # dspark alone
    confidence_head_with_markov: bool = True  # the confidence head reads the Markov embedding too

    @property
    def first_slot(self) -> int:
        """The slot that predicts the first draft."""
        return 1 if self.layout == "dflash" else 0

    @property
    def num_drafts(self) -> int:
        """Drafts of a block, D."""
        return self.block_size - self.first_slot

    def check(self) -> None:
        """Raise ValueError for a config that can't be built or that an engine would misread."""
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout is {self.layout!r}, expected one of {', '.join(LAYOUTS)}")
        if self.num_drafts < 1:
            raise ValueError(
                f"block_size is {self.block_size}, expected at least {1 + self.first_slot} for {self.layout}: raise it"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id is {self.mask_token_id}, expected a row of the target's embedding, 0 to "
                f"{self.vocab_size - 1}: take an unused one"
            )
        if sections := self.rope.get("mrope_section"):
            raise ValueError(
                f"rope: mrope_section is {sections}, expected RoPE on one axis, which is all that block drafts have here: take a "
                "text target"
            )
        layers = list(self.feature_layers)
        if not layers or layers[0] < 1 or layers != sorted(set(layers)):
            raise ValueError(
                f"feature_layers are {layers}, expected layers from 1 on, strictly increasing: engines capture features in "
                "the target's order, and name them by the layer before, of which layer 0 has none"
            )
        if self.layout == "dflash" and (self.markov_rank or self.confidence_head):
            raise ValueError(
                "markov_rank and confidence_head belong to dspark: leave them out, or set layout to dspark"
            )
        if self.layout == "dspark" and self.markov_rank < 1:
            raise ValueError(f"markov_rank is {self.markov_rank}, expected 1 or more for dspark: SGLang refuses others")
