"""What decoding will take of a device's memory, said before it begins.

Weights, keys and values are what they are. What a pass makes on its way is reckoned from its largest tensors, a little high:
a prompt's hidden states, masks and features at prefill, logits of a tree's nodes and of the draft's beams in a cycle.

Letters: T tokens, B prompts at once, M num_draft_tokens, K topk, H hidden, I the MLP's width, V vocabulary, D draft vocabulary.
"""

from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from stages.draft.eagle3 import Eagle3Draft

GIB = 2**30
CUBLAS_WORKSPACE = 2 * (32 << 20)  # its workspaces, of two streams
MATMUL_TIMING_WORKSPACE = 256 << 20  # while products are timed (kernels_gpu)


class MemoryEstimate(NamedTuple):
    """Bytes."""

    target: int
    draft: int
    cache: int  # keys and values of both
    tokens: int  # that the cache holds
    work: int  # what a pass makes

    @property
    def total(self) -> int:
        return self.target + self.draft + self.cache + self.work

    def __str__(self) -> str:
        parts = [(self.target, "of the target"), (self.draft, "of the draft"), (self.work, "for what passes make")]
        parts.insert(2, (self.cache, f"of keys and values of {self.tokens} tokens"))
        said = ", ".join(f"{size / GIB:.3g} {what}" for size, what in parts)
        return f"{said}: {self.total / GIB:.3g} GiB"

    def check(self, free: float, device: torch.device) -> None:
        """Raises ValueError where what isn't there yet, all but the weights, is more than `free` bytes."""
        if (need := self.cache + self.work) > free:
            raise ValueError(
                f"{need / GIB:.3g} GiB are needed beside the weights, {device} has {free / GIB:.3g} GiB left ({self}); lower "
                "benchmark.workloads.*.max_new_tokens or concurrency, use shorter prompts, or end what else runs there"
            )


def count_weight_bytes(module: nn.Module | None) -> int:
    return 0 if module is None else sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])


def estimate_activation_bytes(
    model: PreTrainedModel,
    draft: Eagle3Draft | None,
    tokens: int,
    slots: int,
    tree: tuple[int, int, int] | None,
    drawn: bool,
) -> int:
    """What a prompt's prefill or a pass over `slots` prompts makes, whichever is more. `drawn`: above temperature 0."""
    each, config = model.dtype.itemsize, model.config.get_text_config()
    (vocabulary, hidden), (_, topk, width) = model.get_input_embeddings().weight.shape, tree or (0, 0, 1)
    wide = max(getattr(config, "intermediate_size", 0), compute_routed_width(config))
    along = tokens * each * (3 * wide + 6 * hidden)  # [T, I] three times, streams, queries, keys, values
    along += tokens * tokens * (1 + each)  # the mask, and as it is added
    if tree is not None:
        along += tokens * each * 12 * hidden  # [T, 3H] in parts and together; what the draft reads of them
    nodes = slots * width
    cycle = nodes * (each * (3 * wide + 9 * hidden) + vocabulary * (each + (40 if drawn else 0)))
    if draft is not None and tree is not None:
        cycle += slots * topk * draft.config.draft_vocab_size * (each + 24)  # float32, keys that order them, their sort
    fixed = CUBLAS_WORKSPACE + MATMUL_TIMING_WORKSPACE if model.device.type == "cuda" else 0
    return max(along, cycle) + fixed


def compute_routed_width(config: object) -> int:
    """The width of all experts that a token meets; 0 without any."""
    return int(getattr(config, "moe_intermediate_size", 0) or 0) * int(getattr(config, "num_experts_per_tok", 0) or 0)
