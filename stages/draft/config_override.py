"""The file of init_draft.draft_config_path: a config.json that overrides values inferred from the target.

Sizes and RoPE keys override. Keys fixed by the target, its tokenizer or params.yaml must agree with those. Keys without
effect on a draft are ignored. Any other key is refused. AngelSlim has the same option.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from stages.draft.config_types import check_types
from stages.draft.eagle3_config import DraftConfig
from stages.draft.published_files import unify_rope_parameters
from stages.runtime import guarded_files

COUNT_KEYS = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
IGNORED_KEYS = {
    "architectures", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "initializer_range", "pad_token_id",
    "pretraining_tp", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip


def read_override(path: Path) -> dict[str, Any]:
    """Read the file. Raises ValueError where it is missing or does not hold a JSON object."""
    key = f"params.yaml: init_draft.draft_config_path is {path}"
    try:
        found: dict[str, Any] = guarded_files.read_json(path, "correct it, or null")
        check_types(found)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    return found


def apply_override(overrides: dict[str, Any], inferred: DraftConfig, fixed: dict[str, Any]) -> DraftConfig:
    """Return the inferred sizes and RoPE overridden by `overrides`; `fixed` is the config.json without them.

    Raises ValueError for a key that is unknown, of a wrong type, or different from its fixed value.
    """
    overridable = (*COUNT_KEYS, "rms_norm_eps", *ROPE_KEYS)
    for key, value in overrides.items():
        if key in COUNT_KEYS and not (type(value) is int and value > 0):
            raise _make_refusal(key, value, "expected a whole number above 0")
        if key == "rms_norm_eps" and not (type(value) is float and value > 0):
            raise _make_refusal(key, value, "expected a number above 0")
        if key in overridable or key in IGNORED_KEYS:
            continue
        if key not in fixed:
            raise _make_refusal(
                key,
                value,
                f"expected one of {', '.join(sorted({*overridable, *fixed}))}: correct it, or leave the key out",
            )
        if value != fixed[key]:
            raise _make_refusal(key, value, f"expected {fixed[key]!r}, the value of the target or params.yaml")
    c = replace(inferred, **{key: overrides[key] for key in (*COUNT_KEYS, "rms_norm_eps") if key in overrides})
    if c.num_attention_heads % c.num_key_value_heads:
        raise _make_refusal("num_attention_heads", c.num_attention_heads, "expected a multiple of num_key_value_heads")
    if c.head_dim % 2:
        raise _make_refusal("head_dim", c.head_dim, "expected an even number, since RoPE rotates pairs")
    if any(key in overrides for key in ROPE_KEYS):
        return replace(c, rope=_override_rope(c.rope, {key: overrides[key] for key in ROPE_KEYS if key in overrides}))
    return c


def _override_rope(rope: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the RoPE keys of `overrides` in the spelling of transformers, completed by `rope`: its theta, or its scaling."""
    if "rope_scaling" not in overrides and "rope_parameters" not in overrides:
        return rope | {"rope_theta": float(overrides["rope_theta"])}
    has_theta = "rope_theta" in (overrides.get("rope_parameters") or {})
    return unify_rope_parameters(({} if has_theta else {"rope_theta": rope["rope_theta"]}) | overrides)


def _make_refusal(key: str, value: Any, reason: str) -> ValueError:
    return ValueError(f"params.yaml: init_draft.draft_config_path: {key} is {value!r}, {reason}")
