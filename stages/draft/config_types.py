"""Types of the keys of a draft's config.json, in every published form and in ours: a wrong one is named before it is used.

Which keys a form has, and which values of them run here, is told by its reader. Keys that no reader uses are not checked. Any
key may be absent or null.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

Size = Annotated[int, Field(gt=0, lt=2**31)]
Layers = Annotated[int, Field(ge=0, le=4096)]
Number = Annotated[float, Field(gt=0)]
ROPE_NUMBERS = {  # by rope_type, what compute_frequencies reads besides rope_theta
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
ROPE_KEYS: dict[Any, str] = {
    str: "rope_type type",  # type: an older name
    Number: "rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings beta_fast beta_slow "
    "attention_factor alpha",
    float: "mscale mscale_all_dim partial_rotary_factor",
    bool: "truncate",
    list[Size]: "mrope_section",
}
DRAFT_KEYS: dict[Any, str] = {
    str: "model_type speculators_model_type method",
    list[str]: "architectures layer_types",
    Size: "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim vocab_size draft_vocab_size "
    "max_position_embeddings target_hidden_size sliding_window swa_window_size",
    Layers: "num_hidden_layers num_target_layers",
    Number: "rms_norm_eps rope_theta",
    int: "mask_token_id ptd_token_id pard_token block_size markov_rank conv_kernel_size conv_group_size selector_rank "
    "selector_top_k",
    list[int]: "target_layer_ids aux_hidden_state_layer_ids eagle_aux_hidden_state_layer_ids",
    bool: "use_sliding_window sliding_window_non_causal is_causal causal use_swa tie_word_embeddings fc_norm use_aux_norm "
    "norm_output norm_before_fc norm_before_residual own_embedding enable_confidence_head confidence_head_with_markov",
}
SECTIONS = ("eagle_config", "dflash_config", "dspark_config", "transformer_layer_config")  # with keys of DRAFT_KEYS


class _Keys(BaseModel):
    """Keys that may be absent or null."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())


def _build(name: str, keys: Mapping[Any, str], base: type[_Keys]) -> Any:
    """Return a class with these keys, by type."""
    fields: dict[str, Any] = {key: (kind | None, None) for kind, words in keys.items() for key in words.split()}
    return create_model(name, __base__=base, **fields)


class _Rope(_Keys):
    @model_validator(mode="after")
    def type_has_its_numbers(self) -> Self:
        found = vars(self)
        kind = found["rope_type"] or found["type"]
        if missing := [key for key in ROPE_NUMBERS.get(kind or "", ()) if found[key] is None]:
            raise ValueError(f"lacks {', '.join(missing)}, which the type {kind} has")
        return self


class _Draft(_Keys):
    @model_validator(mode="after")
    def heads_divide(self) -> Self:
        found = vars(self)
        heads, groups, head_dim = (found[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        if heads and groups and heads % groups:
            raise ValueError(f"{heads} heads, a multiple of the {groups} key-value heads")
        if head_dim and head_dim % 2:
            raise ValueError(f"an even head_dim, found {head_dim}: RoPE rotates pairs")
        return self


RopeKeys = _build("RopeKeys", ROPE_KEYS, _Rope)
SectionKeys = _build("SectionKeys", DRAFT_KEYS | {RopeKeys: "rope_parameters rope_scaling"}, _Draft)
DraftKeys = _build("DraftKeys", {SectionKeys: " ".join(SECTIONS)}, SectionKeys)


def check_types(config: Mapping[str, Any]) -> None:
    """Raise ValueError for the first key of config.json whose value is of another type, or out of its range."""
    try:
        DraftKeys.model_validate(config)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "config.json"
        words = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        raise ValueError(f"{key} is {first['input']!r:.60}, expected {words}; correct it") from None
