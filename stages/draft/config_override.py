"""The file of init_draft.draft_config_path: a config.json that overrides values inferred from the target.

Sizes and RoPE keys override. Keys fixed by the target, its tokenizer or params.yaml must agree with those. Keys without
effect on a draft are ignored. Any other key is refused. AngelSlim has the same option.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from stages.draft.config_types import check_types
from stages.draft.eagle3_config import DraftConfig
from stages.draft.published_files import unify_rope_parameters
from stages.runtime import guarded_files

SIZE_KEYS = (
    "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
IGNORED_KEYS = {
    "architectures", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "initializer_range", "pad_token_id",
    "pretraining_tp", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip


def override_config(path: Path, inferred: DraftConfig, fixed: dict[str, Any]) -> DraftConfig:
    """Return the inferred sizes and RoPE overridden by the file; `fixed` is the config.json without them.

    Raises ValueError for a file that is missing or broken, and for a key that is unknown, of a wrong type, or different from its
    fixed value.
    """
    try:
        found: dict[str, Any] = guarded_files.read_json(path, "correct it, or null")
        check_types(found)
        for key in [key for key in found if key not in {*SIZE_KEYS, *ROPE_KEYS, *IGNORED_KEYS}]:
            if key not in fixed:
                known = ", ".join(sorted({*SIZE_KEYS, *ROPE_KEYS, *fixed}))
                raise ValueError(f"{key} is {found[key]!r}, expected one of {known}: correct it, or leave the key out")
            if found[key] != fixed[key]:
                raise ValueError(
                    f"{key} is {found[key]!r}, expected {fixed[key]!r}, the value of the target or params.yaml"
                )
        sizes = replace(inferred, **{key: found[key] for key in SIZE_KEYS if found.get(key) is not None})
        check_types(asdict(sizes))
        rope = _override_rope(inferred.rope, {key: found[key] for key in ROPE_KEYS if key in found})
        return replace(sizes, rope=rope)
    except ValueError as error:
        raise ValueError(f"params.yaml: init_draft.draft_config_path is {path}: {error}") from None


def _override_rope(rope: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the RoPE keys of `overrides` in the spelling of transformers, completed by `rope`: its theta, or its scaling."""
    if "rope_scaling" not in overrides and "rope_parameters" not in overrides:
        return rope | {key: float(theta) for key, theta in overrides.items()}
    has_theta = "rope_theta" in (overrides.get("rope_parameters") or {})
    return unify_rope_parameters(({} if has_theta else {"rope_theta": rope["rope_theta"]}) | overrides)
