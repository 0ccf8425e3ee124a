"""Types of the keys of a draft's config.json, in every published form and in ours: a wrong one is named before it is used.

Which keys a form has, and which values of them run here, is told by its reader. Keys that no reader uses are not checked.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Size = Annotated[int, Field(gt=0, lt=2**31)]
Layers = Annotated[int, Field(ge=0, le=4096)]
Number = Annotated[float, Field(gt=0)]
ROPE_NUMBERS = {  # by rope_type, what compute_frequencies reads besides rope_theta
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


class _Keys(BaseModel):
    """Keys that may be absent or null."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())


class RopeKeys(_Keys):
    rope_theta: Number | None = None
    rope_type: str | None = None
    type: str | None = None  # an older name
    factor: Number | None = None
    low_freq_factor: Number | None = None
    high_freq_factor: Number | None = None
    original_max_position_embeddings: Number | None = None
    beta_fast: Number | None = None
    beta_slow: Number | None = None
    attention_factor: Number | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    alpha: Number | None = None
    partial_rotary_factor: float | None = None
    mrope_section: list[Size] | None = None

    @model_validator(mode="after")
    def type_has_its_numbers(self) -> Self:
        kind = self.rope_type or self.type
        if missing := [key for key in ROPE_NUMBERS.get(kind or "", ()) if getattr(self, key) is None]:
            raise ValueError(f"lacks {', '.join(missing)}, which the type {kind} has")
        return self


class ProposalKeys(_Keys):
    speculative_tokens: Layers | None = None


class SpeculatorsKeys(_Keys):
    proposal_methods: list[ProposalKeys] | None = None


class DraftKeys(_Keys):
    architectures: list[str] | None = None
    model_type: str | None = None
    speculators_model_type: str | None = None
    method: str | None = None
    hidden_size: Size | None = None
    intermediate_size: Size | None = None
    num_hidden_layers: Layers | None = None
    num_attention_heads: Size | None = None
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    vocab_size: Size | None = None
    draft_vocab_size: Size | None = None
    max_position_embeddings: Size | None = None
    target_hidden_size: Size | None = None
    num_target_layers: Layers | None = None
    rms_norm_eps: Number | None = None
    rope_theta: Number | None = None
    rope_parameters: RopeKeys | None = None
    rope_scaling: RopeKeys | None = None
    sliding_window: Size | None = None
    layer_types: list[str] | None = None
    use_sliding_window: bool | None = None
    sliding_window_non_causal: bool | None = None
    is_causal: bool | None = None
    causal: bool | None = None
    use_swa: bool | None = None
    swa_window_size: Size | None = None
    tie_word_embeddings: bool | None = None
    fc_norm: bool | None = None
    use_aux_norm: bool | None = None
    norm_output: bool | None = None
    norm_before_fc: bool | None = None
    norm_before_residual: bool | None = None
    mask_token_id: int | None = None
    block_size: int | None = None
    markov_rank: int | None = None
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    selector_rank: int | None = None
    selector_top_k: int | None = None
    target_layer_ids: list[int] | None = None
    aux_hidden_state_layer_ids: list[int] | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    enable_confidence_head: bool | None = None
    confidence_head_with_markov: bool | None = None
    eagle_config: "DraftKeys | None" = None
    dflash_config: "DraftKeys | None" = None
    dspark_config: "DraftKeys | None" = None
    transformer_layer_config: "DraftKeys | None" = None
    speculators_config: SpeculatorsKeys | None = None

    @model_validator(mode="after")
    def heads_divide(self) -> Self:
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if heads and groups and heads % groups:
            raise ValueError(f"{heads} heads, a multiple of the {groups} key-value heads")
        if self.head_dim and self.head_dim % 2:
            raise ValueError(f"an even head_dim, found {self.head_dim}: RoPE rotates pairs")
        return self


def check_types(config: Mapping[str, Any]) -> None:
    """Raise ValueError for the first key of config.json whose value is of another type, or out of its range."""
    try:
        DraftKeys.model_validate(config)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "config.json"
        words = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        raise ValueError(f"{key} is {first['input']!r:.60}, expected {words}; correct it") from None
