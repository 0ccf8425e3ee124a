"""Masks by which the decoder of a target computes a tree in one pass, and the check that its class obeys them."""

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from stages.target.config_facts import read_sliding_window

TREE_TOLERANCE = 1e-3  # in float32
PREFIX, SIBLINGS = 8, 5  # tokens of the chain, and of the tree's nodes behind it


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


@torch.inference_mode()
def explain_tree_mask_failure(model: PreTrainedModel) -> str | None:
    """Return how the decoder's hidden states of siblings behind a prefix differ from those of each alone; None where they agree.

    The engine gives all nodes of a tree in one pass, each with a mask of its ancestors and its depth as position. A class that
    mixes tokens without regard to the mask, or takes none, can't verify trees. A sliding window shorter than the prefix is in the
    mask. Nor does one whose tokens, without a mask, attend to later ones: then a prompt alone has other hidden states than in
    front of its answer.
    """
    decoder, size = model.get_decoder(), PREFIX + SIBLINGS
    rows = model.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(size) * 7919 + 11) % rows
    ids[ids == getattr(model.config, "image_token_id", None)] = 0
    ids = ids.to(model.device)
    mask = torch.ones(size, size, dtype=torch.bool, device=ids.device).tril()
    mask[PREFIX:, PREFIX:] = torch.eye(SIBLINGS, dtype=torch.bool, device=ids.device)
    positions = torch.arange(size, device=ids.device).clamp(max=PREFIX)[None]
    masks = build_layer_masks(decoder.config, mask[None, None], positions, positions)
    try:
        out = decoder(input_ids=ids[None], position_ids=positions, attention_mask=masks, use_cache=False)
    except Exception as error:  # any class may raise anything
        return f"its decoder takes no mask of a tree ({type(error).__name__}: {str(error)[:200]})"
    together: Tensor = out.last_hidden_state[0, PREFIX:].float()  # [N, H]
    prefix, longer = (decoder(input_ids=ids[None, :end], use_cache=False).last_hidden_state for end in (PREFIX, size))
    if (difference := _compare(longer[0, :PREFIX].float(), prefix[0].float())) >= TREE_TOLERANCE:
        return f"tokens have other hidden states with tokens behind them than without (by {difference:.1%})"
    chains = [torch.cat([ids[:PREFIX], ids[n : n + 1]])[None] for n in range(PREFIX, size)]
    alone = torch.stack(
        [decoder(input_ids=chain, use_cache=False).last_hidden_state[0, -1].float() for chain in chains]
    )
    if (difference := _compare(together, alone)) < TREE_TOLERANCE:
        return None
    return f"tokens of a tree have other hidden states than each alone (by {difference:.1%}), whatever the mask"


def _compare(found: Tensor, expected: Tensor) -> float:
    """Return the relative difference of hidden states [N, H]: the median of the tokens, since a router may flip for one."""
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median())
