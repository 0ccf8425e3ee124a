"""The floating-point operations of training a block draft, counted from its shapes: the floor of a step's time.

A product of an [m, k] matrix with a [k, n] one is 2mkn; backward is one product for the gradient of each factor that has
one. The target's features, embedding and head are frozen, so `fc` has no gradient of its input and the head none of its weight.

    context token    fc, and keys and values of every layer
    block row        projections and MLP of every layer
    pair             a block row and a key that it sees, of its context or its own block: query times key, weight times value
    draft            the logits of a valid draft and the gradient of its state; where the loss reads the target's distribution,
                     its logits too; the Markov head or the selector; the confidence head

Norms, rotations, softmax and the optimizer are no products and are not counted, nor is what is computed and masked out: keys
that a row does not see, and what FlexAttention computes a second time in its backward pass.
"""

from operator import mul
from typing import NamedTuple

from stages.families.block.model import BlockDraftConfig


class BlockCounts(NamedTuple):
    """The counts of a pack, a step or an epoch, which may be means, or the FLOP of one of each."""

    tokens: float  # of context
    blocks: float  # their rows, without attention and heads
    drafts: float  # valid ones
    pairs: float  # of a block row and a key that it sees

    def dot(self, other: "BlockCounts") -> float:
        """Return the FLOP of counts by those of one of each."""
        return sum(map(mul, self, other))


def count_block_flop(c: BlockDraftConfig, reads_target: bool) -> BlockCounts:
    """Return the forward and backward FLOP of one context token, block, draft and pair.

    `reads_target`: the loss reads the target's distribution (DSpark's does).
    """
    h, queries, keys = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    row = 2 * h * queries + 2 * h * keys + 3 * h * c.intermediate_size  # weights of a layer that a block row meets
    if c.conv_group_size:  # the kernels of both convolutions
        row += 2 * h * (2 * c.conv_kernel_size * h // c.conv_group_size)
    logits, markov, selector = c.vocab_size * h, c.vocab_size * c.markov_rank, c.selector_rank * h
    confidence = (h + c.markov_rank * c.confidence_head_with_markov) * c.confidence_head
    return BlockCounts(
        tokens=4 * len(c.feature_layers) * h * h + 6 * c.num_hidden_layers * 2 * h * keys,
        blocks=6 * c.num_hidden_layers * row * c.block_size,
        drafts=(6 if reads_target else 4) * logits + 6 * markov + 6 * selector + 6 * confidence,
        pairs=12 * c.num_hidden_layers * queries,
    )
