"""Sizes, method and heads of a block draft, apart from the model: files and servers need these, and no tensors."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from stages.params.families import BLOCKS, DFLASH2_SIZES


class Sight(NamedTuple):
    """The part of its context and its block that a slot sees in a layer."""

    window: int | None = None  # positions up to its own, itself counted; None: all of its document
    is_causal: bool = False  # no later slots of its block


EVERYTHING = Sight()


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
    method: str  # one of BLOCKS
    block_size: int  # B
    mask_token_id: int
    feature_layers: tuple[int, ...]  # the residual stream entering block i of the target, strictly increasing
    markov_rank: int = 0  # r; dspark alone
    confidence_head: bool = False  # dspark alone
    confidence_head_with_markov: bool = True  # the confidence head reads the Markov embedding too
    conv_kernel_size: int = 0  # taps of the convolutions around attention and MLP; this and the following dflash2 alone
    conv_group_size: int = 0  # channels that share a dynamic kernel
    selector_rank: int = 0  # r of the candidate selector
    selector_top_k: int = 0  # candidates of a slot
    sights: tuple[Sight, ...] = ()  # by layer; empty where all of them see everything

    def __post_init__(self) -> None:
        if set(self.sights) == {EVERYTHING}:
            object.__setattr__(self, "sights", ())

    @property
    def layer_sights(self) -> tuple[Sight, ...]:
        return self.sights or (EVERYTHING,) * self.num_hidden_layers

    @property
    def first_slot(self) -> int:
        """The slot that predicts the first draft."""
        return BLOCKS[self.method].first_slot or 0

    @property
    def num_drafts(self) -> int:
        """Return the number of draft tokens of a block, D."""
        return BLOCKS[self.method].count_drafts(self.block_size)

    def check(self) -> None:
        """Raise ValueError for a config that can't be built or that an engine would misread."""
        if self.method not in BLOCKS:
            raise ValueError(f"method is {self.method!r}, expected one of {', '.join(BLOCKS)}")
        if self.num_drafts < 1:
            raise ValueError(
                f"block_size is {self.block_size}, expected at least {1 + self.first_slot} for {self.method}: raise it"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id is {self.mask_token_id}, expected a row of the target's embedding, 0 to "
                f"{self.vocab_size - 1}: take an unused one"
            )
        if sections := self.rope.get("mrope_section"):
            raise ValueError(
                f"rope: mrope_section is {sections}, expected RoPE on one axis, which is all that block drafts have in engines"
            )
        layers = list(self.feature_layers)
        if not layers or layers[0] < 1 or layers != sorted(set(layers)):
            raise ValueError(
                f"feature_layers are {layers}, expected layers from 1 on, strictly increasing: engines capture features in "
                "the target's order, and name them by the layer before, of which layer 0 has none"
            )
        if self.method != "dspark" and (self.markov_rank or self.confidence_head):
            raise ValueError(
                "markov_rank and confidence_head belong to dspark: leave them out, or set method to dspark"
            )
        self._check_convolutions_and_selector()
        self._check_sights()
        if self.method == "dspark" and self.markov_rank < 1:
            raise ValueError(f"markov_rank is {self.markov_rank}, expected 1 or more for dspark: SGLang refuses others")

    def _check_sights(self) -> None:
        windows = {sight.window for sight in self.sights if sight.window is not None}
        if len(self.layer_sights) != self.num_hidden_layers or len(windows) > 1 or min(windows, default=1) < 1:
            raise ValueError(
                f"layers see {list(self.sights)}, expected {self.num_hidden_layers} of them, and one sliding window of 1 or more"
            )

    def _check_convolutions_and_selector(self) -> None:
        sizes = {name: getattr(self, name) for name in DFLASH2_SIZES}
        if self.method != "dflash2":
            if any(sizes.values()):
                raise ValueError(f"{', '.join(sizes)} belong to dflash2: leave them out, or set method to dflash2")
            return
        if sizes[smallest := min(sizes, key=sizes.__getitem__)] < 1:
            raise ValueError(f"{smallest} is {sizes[smallest]}, expected 1 or more for dflash2")
        if self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"conv_group_size is {self.conv_group_size}, expected a divisor of the hidden size {self.hidden_size}"
            )
        if self.selector_top_k > self.vocab_size:
            raise ValueError(
                f"selector_top_k is {self.selector_top_k}, expected at most the {self.vocab_size} tokens of the vocabulary"
            )
