"""Attention masks of a decoder some of whose layers, or all, see a sliding window of the tokens before each.

Given a mask of its own, transformers applies that to every layer as it is: the window must be in it. Classes whose layers differ
take one mask for each type of layer.

Letters: B prompts, M queries of each, T keys.
"""

from torch import Tensor
from transformers import PretrainedConfig

from stages.target.layer_state import read_sliding_window


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
