"""A draft's config.json as a user writes it, to override what is inferred from the target (AngelSlim's draft_config_path).

Keys that say what the draft is made of override; keys that the target, its tokenizer or params.yaml settle must agree
with them; keys that nobody reads of a draft are let be; any other key is refused.
"""

import json
from pathlib import Path
from typing import Any

from stages.draft.published_formats import unify_rope_parameters

COUNT_KEYS = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
IGNORED_KEYS = {
    "architectures", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "initializer_range", "pad_token_id",
    "pretraining_tp", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip


def read_override(path: Path) -> dict[str, Any]:
    """The keys of the file. Raises ValueError where it is missing or holds no JSON object."""
    key = f"params.yaml: init_draft.draft_config_path is {path}"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{key}, which does not exist; correct it, or null") from None
    except OSError as error:
        raise ValueError(f"{key}, expected a file that can be read ({error}); correct it, or null") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{key}, expected JSON ({error}); correct it") from None
    if not isinstance(found, dict):
        raise ValueError(f"{key}, expected a JSON object, found {type(found).__name__}; correct it")
    return found


def apply_override(
    given: dict[str, Any], shape: dict[str, Any], rope: dict[str, Any], settled: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`shape` and `rope` with the keys `given`; `settled` is the config.json without them.

    Raises ValueError for a key that is unknown, of a wrong kind, or can't be another than it is.
    """
    free = (*COUNT_KEYS, "rms_norm_eps", *ROPE_KEYS)
    for key, value in given.items():
        if key in COUNT_KEYS and not (type(value) is int and value > 0):
            raise _make_refusal(key, value, "expected a whole number above 0")
        if key == "rms_norm_eps" and not (type(value) is float and value > 0):
            raise _make_refusal(key, value, "expected a number above 0")
        if key in free or key in IGNORED_KEYS:
            continue
        if key not in settled:
            raise _make_refusal(
                key, value, f"expected one of {', '.join(sorted({*free, *settled}))}: correct it, or leave the key out"
            )
        if value != settled[key]:
            raise _make_refusal(key, value, f"expected {settled[key]!r}, as the target and params.yaml have it")
    shape = shape | {key: given[key] for key in (*COUNT_KEYS, "rms_norm_eps") if key in given}
    if shape["num_attention_heads"] % shape["num_key_value_heads"]:
        raise _make_refusal(
            "num_attention_heads", shape["num_attention_heads"], "expected a multiple of num_key_value_heads"
        )
    if shape["head_dim"] % 2:
        raise _make_refusal("head_dim", shape["head_dim"], "expected an even number, for RoPE turns pairs")
    if any(key in given for key in ROPE_KEYS):
        inherited = {} if "rope_theta" in (given.get("rope_parameters") or {}) else {"rope_theta": rope["rope_theta"]}
        written = {key: given[key] for key in ROPE_KEYS if key in given}
        scaled = "rope_scaling" in written or "rope_parameters" in written
        rope = (
            unify_rope_parameters(inherited | written) if scaled else rope | {"rope_theta": float(given["rope_theta"])}
        )
    return shape, rope


def _make_refusal(key: str, value: Any, why: str) -> ValueError:
    return ValueError(f"params.yaml: init_draft.draft_config_path: {key} is {value!r}, {why}")
