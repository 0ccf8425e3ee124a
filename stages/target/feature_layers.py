"""Ids of feature layers: defaults of each family of drafts, other projects' numbering, columns of stored features.

An id i is *the residual stream entering block i* of the target, transformers' `hidden_states[i]`: the stream after i blocks,
0 the embeddings. Ids are strictly increasing, since engines capture in the order of the blocks whatever the order of a list.
Other numberings appear only in files that are written for, or read from, other projects (docs/drafts.md has the table):

    entering block i         here; vLLM and speculators (`eagle_aux_hidden_state_layer_ids`, `aux_hidden_state_layer_ids`)
    after layer k = i - 1    SGLang (`eagle_config`); DFlash, DSpark, DeepSpec and SpecForge (`target_layer_ids`), also in vLLM
"""

from collections.abc import Sequence

NUM_EAGLE3_FEATURES = 3  # low, mid, high
NUM_BLOCK_DRAFT_LAYERS = 5  # of a block draft (DFlash, DSpark), as published


def engine_default_feature_layers(num_layers: int) -> list[int]:
    """Return the layers that SGLang and vLLM give an EAGLE-3 draft whose config.json lists none: [2, n//2, n-3]."""
    return [2, num_layers // 2, num_layers - 3]


def default_eagle3_feature_layers(num_layers: int) -> list[int]:
    """Return EAGLE-3's three layers: [2, n//2, n-3], as SGLang, vLLM and EAGLE.

    These differ from 7 blocks on; a smaller target has its second (of 3 blocks the first), middle and last.
    """
    if num_layers < 7:
        return [min(1, num_layers // 2 - 1), num_layers // 2, num_layers - 1]
    return engine_default_feature_layers(num_layers)


def choose_block_feature_layers(stored: Sequence[int], num_layers: int) -> list[int]:
    """Return the stored layers that a block draft reads by default: the published five if all are stored, else all stored.

    The five are the defaults of DFlash, SpecForge, DeepSpec and SGLang, evenly spread from after layer 1 to after layer n - 3: 36
    blocks give 2 10 18 26 34. A target with too few blocks for five has all its inner streams. Their number does not depend on
    the draft's own layers: a small draft gains by each of them too.
    """
    published = to_entering_ids(_spread_evenly(1, num_layers - 3, NUM_BLOCK_DRAFT_LAYERS))
    if num_layers <= 4 or len(set(published)) < NUM_BLOCK_DRAFT_LAYERS:
        count = min(NUM_BLOCK_DRAFT_LAYERS, num_layers - 1)
        published = _spread_evenly(1, num_layers - 1, count) if count > 1 else [1]
    return published if set(published) <= set(stored) else list(stored)


def _spread_evenly(first: int, last: int, count: int) -> list[int]:
    return [round(first + i * (last - first) / (count - 1)) for i in range(count)]  # halves to even, as the sources do


def to_after_layer_ids(entering: Sequence[int]) -> list[int]:
    """Return ids of the layers that the streams leave, as SGLang and block drafts' `target_layer_ids` count."""
    return [i - 1 for i in entering]


def to_entering_ids(after_layer: Sequence[int]) -> list[int]:
    """Return ids of the blocks that the streams enter, from ids of the layers that they leave."""
    return [k + 1 for k in after_layer]


def locate_feature_layers(stored: Sequence[int], read: Sequence[int], reader: str) -> list[int]:
    """Return the index of each id of `read` in `stored`; `reader` names what reads them, for the message.

    Raises ValueError where one is not stored.
    """
    if missing := [i for i in read if i not in stored]:
        raise ValueError(
            f"{reader} reads the residual streams entering blocks {[*read]}, the hidden states here are those of {[*stored]}, "
            f"without {', '.join(map(str, missing))}; set target.feature_layers to {sorted({*stored, *read})}, or train or "
            "import a draft for the stored ones"
        )
    return [stored.index(i) for i in read]
