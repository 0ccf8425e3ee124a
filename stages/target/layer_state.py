"""Tell from a config what a decoder's layers keep while it decodes, and how far they see: what the torch engine can't do."""

from collections import Counter

from torch import Tensor
from transformers import DynamicCache, PretrainedConfig

KEYS_AND_VALUES = ("DynamicLayer", "DynamicSlidingWindowLayer")  # transformers' layers that keep nothing else


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


def build_layer_masks(
    config: PretrainedConfig, mask: Tensor, query_positions: Tensor, key_positions: Tensor
) -> Tensor | dict[str, Tensor]:
    """Return `attention_mask` for a decoder with this config: what mask [B, 1, M, T] bool admits, and its windows reach.

    Positions, [B, M] of queries and [B, T] of keys, are numbers of tokens: of a node of a tree that of its depth.
    """
    config = config.get_text_config()
    window = read_sliding_window(config)
    if window is None:
        return mask
    near = query_positions[:, None, :, None] - key_positions[:, None, None, :] < window
    kinds = getattr(config, "layer_types", None)
    return mask & near if kinds is None else {"full_attention": mask, "sliding_attention": mask & near}
