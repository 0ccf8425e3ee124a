"""An estimate, before decoding starts, of the device memory that it needs.

Weights, keys and values are exact. The activations of a pass are estimated from its largest tensors, a little high: hidden
states, masks and features of a prompt at prefill; logits of a tree's nodes and of the draft's beams in a cycle.

Letters: T tokens, B prompts at once, M num_draft_tokens, K topk, H hidden, I the MLP's width, V vocabulary, D draft vocabulary.
"""

from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from stages.engine.decode import Engine
from stages.engine.decode_state import round_up_capacity
from stages.engine.proposer import Drafter
from stages.params.tree_shape import TreeShape
from stages.params.units import format_bytes

CUBLAS_WORKSPACE = 2 * (32 << 20)  # of two streams
MATMUL_TIMING_WORKSPACE = 256 << 20  # while matrix products are timed (matmul_triton)


class MemoryEstimate(NamedTuple):
    """Bytes, and the tokens that the caches hold."""

    target: int
    draft: int
    cache: int  # keys and values of both
    cache_tokens: int
    activations: int

    @property
    def total(self) -> int:
        return self.target + self.draft + self.cache + self.activations

    def __str__(self) -> str:
        cache = f"of keys and values of {self.cache_tokens} tokens"
        parts = [(self.target, "of the target"), (self.draft, "of the draft"), (self.cache, cache)]
        parts.append((self.activations, "of activations"))
        listed = ", ".join(f"{format_bytes(size)} {name}" for size, name in parts)
        return f"{listed}: {format_bytes(self.total)}"

    def check(self, free: float, device: torch.device) -> None:
        """Raise ValueError where caches and activations exceed `free` bytes; weights are already loaded."""
        if (need := self.cache + self.activations) > free:
            raise ValueError(
                f"{format_bytes(need)} are needed beside the weights, {device} has {format_bytes(free)} left ({self}); lower "
                "benchmark.workloads.*.max_new_tokens or concurrency, use shorter prompts, or end what else runs there"
            )


def count_weight_bytes(module: nn.Module | None) -> int:
    return 0 if module is None else sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])


def estimate_memory(
    engine: Engine,
    tokens: int,
    num_slots: int,
    tree: TreeShape | None,
    samples: bool = False,  # above temperature 0
    samples_drafts: bool = False,
) -> MemoryEstimate:
    """Return the memory for `num_slots` prompts of at most `tokens` with their answers.

    Raises ValueError for a length or a tree that can't be decoded at all.
    """
    engine.slots.check_length(tokens)
    spare = engine.count_spare_rows(engine.get_tree_method(tree) if tree else None)
    cache_tokens = num_slots * round_up_capacity(tokens + spare)
    return MemoryEstimate(
        count_weight_bytes(engine.model),
        count_weight_bytes(engine.drafter.module if engine.drafter else None),
        engine.slots.count_cache_bytes(cache_tokens),
        cache_tokens,
        _estimate_activation_bytes(
            engine.model, engine.drafter, tokens, num_slots, tree, 40 * samples + 16 * samples_drafts
        ),
    )


def _estimate_activation_bytes(
    model: PreTrainedModel,
    drafter: Drafter | None,
    tokens: int,
    num_slots: int,
    tree: TreeShape | None,
    drawing_bytes: int,
) -> int:
    """Return the activations of a prompt's prefill or of a pass over `num_slots` prompts, whichever are more.

    drawing_bytes: those by which drawing tokens adds to each logit of the target.
    """
    item_bytes, config = model.dtype.itemsize, model.config.get_text_config()
    vocabulary, hidden = model.get_input_embeddings().weight.shape
    wide = max(getattr(config, "intermediate_size", 0), compute_routed_width(config))
    prefill = tokens * item_bytes * (3 * wide + 6 * hidden)  # [T, I] three times, streams, queries, keys, values
    prefill += tokens * tokens * (1 + item_bytes)  # the mask as bool and as additive bias
    if tree is not None:
        width = drafter.feature_width if drafter is not None else 3 * hidden
        # Features in parts and joined; the draft's fused input.
        prefill += tokens * item_bytes * (2 * width + 6 * hidden)
    nodes = num_slots * (tree.num_draft_tokens if tree else 1)
    cycle = nodes * (item_bytes * (3 * wide + 9 * hidden) + vocabulary * (item_bytes + drawing_bytes))
    if drafter is not None and tree is not None:
        cycle += num_slots * drafter.count_logits(tree) * (item_bytes + 24)  # float32, sort keys, their sort
    fixed = CUBLAS_WORKSPACE + MATMUL_TIMING_WORKSPACE if model.device.type == "cuda" else 0
    return max(prefill, cycle) + fixed


def compute_routed_width(config: object) -> int:
    """Return the total width of the experts that one token is routed to, 0 for a dense model."""
    return int(getattr(config, "moe_intermediate_size", 0) or 0) * int(getattr(config, "num_experts_per_tok", 0) or 0)
