"""Read from a transformers config what a draft and the torch engine depend on, whatever the class calls it: shapes, rotary
parameters, what the layers keep while they decode, and how far they see.
"""

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, DynamicCache, PretrainedConfig

KEYS_AND_VALUES = ("DynamicLayer", "DynamicSlidingWindowLayer")  # transformers' layers that keep nothing else


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
        return torch.arange(3, device="cpu").repeat_interleave(torch.tensor(section, device="cpu"))
    found = torch.zeros(head_dim // 2, dtype=torch.int64)
    for axis in (1, 2):
        found[axis : 3 * section[axis] : 3] = axis
    return found


def read_config_facts(whole: PretrainedConfig) -> dict[str, Any]:
    """Return the shapes that a draft depends on, by the manifest's names, from the text config of a multimodal one.

    Raises ValueError naming the key, where a config has it under no known name.
    """
    config = whole.get_text_config()
    heads, hidden = _read_required(config, "num_attention_heads"), _read_required(config, "hidden_size")
    tied = _read_first(
        whole, "tie_word_embeddings"
    )  # the outer config decides, else the text config, as in transformers
    rope = read_rope_parameters(config)
    if "mrope_section" in rope:
        rope["mrope_interleaved"] = is_mrope_interleaved(config)
    facts = {
        "hidden_size": hidden,
        "intermediate_size": _read_required(config, "intermediate_size", "moe_intermediate_size"),
        "num_layers": _read_required(config, "num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": _read_first(config, "num_key_value_heads") or heads,
        "head_dim": _read_first(config, "head_dim") or hidden // heads,  # absent or null in half of the classes
        "vocab_size": _read_required(config, "vocab_size"),
        "rms_norm_eps": _read_required(config, "rms_norm_eps"),
        "rope": rope,
        "max_position_embeddings": _read_required(config, "max_position_embeddings"),
        "tie_word_embeddings": bool(_read_first(config, "tie_word_embeddings") if tied is None else tied),
    }
    counts = {name: facts[name] for name in facts if name not in ("rms_norm_eps", "rope", "tie_word_embeddings")}
    wrong = {name: value for name, value in counts.items() if type(value) is not int or value < 1}
    numbers = {"rms_norm_eps": facts["rms_norm_eps"], "rope_theta": rope["rope_theta"]}
    wrong |= {n: x for n, x in numbers.items() if type(x) not in (int, float) or not 0 < x < math.inf}
    if wrong:
        listed = ", ".join(f"{name} {str(value)[:60]!r}" for name, value in wrong.items())
        raise ValueError(f"the target's config.json has {listed}, expected numbers above 0; correct it")
    return facts


def read_rope_parameters(config: PretrainedConfig) -> dict[str, Any]:
    """Return the rotary embedding's parameters by transformers 5's names, as a draft of this target has them.

    Older configs, and those of remote code, have `rope_theta` and `rope_scaling` (with `rope_type` or `type`). Where each type of
    layer has its own (Gemma 3, OLMo 3), those of full attention, since a draft attends to all tokens. Without
    `partial_rotary_factor` (GLM-4, Phi-4-mini): a draft rotates whole heads, and engines would rotate a part if it were named.
    """
    found = dict(_read_first(config, "rope_parameters") or {})
    if by_layer_type := {name: value for name, value in found.items() if isinstance(value, dict)}:
        found = dict(by_layer_type.get("full_attention") or next(iter(by_layer_type.values())))
    if "rope_theta" not in found:
        found = {**(_read_first(config, "rope_scaling") or {}), **found}
        found["rope_theta"] = _read_first(config, "rope_theta") or 10_000.0
    found.pop("partial_rotary_factor", None)
    kind = found.pop("type", "default")
    found.setdefault("rope_type", kind)
    if found["rope_type"] == "mrope":  # Qwen2-VL's name for the default with mrope_section
        found["rope_type"] = "default"
    if found["rope_type"] == "yarn" and found.get("original_max_position_embeddings") is None:
        found["original_max_position_embeddings"] = config.max_position_embeddings  # transformers' default too
    return found


def is_mrope_interleaved(config: PretrainedConfig) -> bool:
    """Return whether this class assigns frequencies to the three axes interleaved (see `mrope`); few configs tell.

    Found by moving a token along one axis at a time in the class's own rotary module. Raises ValueError for any layout but
    chunked and interleaved, and for a text model that transformers has no Auto class for (ERNIE 4.5 VL, PaddleOCR-VL).
    """
    if type(config) not in AutoModel._model_mapping and "AutoModel" not in (getattr(config, "auto_map", None) or {}):
        raise ValueError(
            f"the target's text model ({type(config).__name__}) has positions on three axes (mrope_section) and no class among "
            "transformers' AutoModel, expected one whose rotary module shows their layout; such a model can't be a target yet"
        )
    with torch.device("meta"):
        module = type(AutoModel.from_config(config).rotary_emb)
    moved = torch.eye(3, dtype=torch.int64)[:, None]  # [3, 1, 3]: token n moved along axis n
    _, sin = module(config)(torch.empty(1, dtype=torch.float32), moved)  # [1, 3, E], its halves alike
    found = sin[0, :, : sin.shape[-1] // 2].argmax(0)  # [E / 2]
    for interleaved in (False, True):
        rope = {**read_rope_parameters(config), "mrope_interleaved": interleaved}
        if torch.equal(found, assign_frequency_axes(rope, sin.shape[-1])):
            return interleaved
    raise ValueError(
        f"the target's {module.__name__} assigns frequencies to the axes as {found.tolist()}, expected mrope_section "
        f"{read_rope_parameters(config)['mrope_section']} chunked or interleaved; such a model can't be a target yet"
    )


def _read_first(config: Any, *names: str) -> Any:
    """Return the first of these keys that is present and not null; of a key that differs by layer (Gemma 4) the first layer's."""
    return next((value for name in names if (value := _read_key(config, name)) is not None), None)


def _read_key(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers' AmbiguousGlobalPerLayerAttributeError, which its 5.17 does not have
        return getattr(config.per_layer_config[0], name, None)


def _read_required(config: Any, *names: str) -> Any:
    found = _read_first(config, *names)
    if found is None:
        raise ValueError(
            f"the target's config ({type(config).__name__}) has no {' or '.join(names)}; such a model can't be a target yet"
        )
    return found


def describe_other_state(config: PretrainedConfig) -> str | None:
    """Return which layers keep state other than keys and values of their own, None where none does.

    Such are linear attention and Mamba, with attention in the same layer or without, an index of keys (DeepSeek-V3.2), and
    layers that read those of another. Rejected drafts can't be removed from a state that has summed them up. Layers that attend
    to an image alone (Mllama) are skipped for texts, and then keep nothing.
    """
    if crossing := getattr(config.get_text_config(), "cross_attention_layers", None):
        return f"{len(crossing)} of its {config.get_text_config().num_hidden_layers} layers (cross-attention to images)"
    layers = DynamicCache(config=config).layers
    other = Counter(type(layer).__name__ for layer in layers if type(layer).__name__ not in KEYS_AND_VALUES)
    return f"{other.total()} of its {len(layers)} layers ({', '.join(sorted(other))})" if other else None


def read_sliding_window(config: PretrainedConfig) -> int | None:
    """Return the sliding window of the layers, or None where all of them attend to every token."""
    config = config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    return getattr(config, "sliding_window", None)
