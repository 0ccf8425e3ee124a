"""Training of block drafts (DFlash, DFlash2, DSpark) on packs: which blocks are supervised, and the loss of a pack.

Of each pack up to `num_anchors` anchors are drawn, again in every epoch, by train_draft.seed and the pack's index in training
(epoch, step, pack), a share of each document; so neither the number of processes nor a resume changes them. Labels and loss:
loss.py.

The steps of the log are the drafts of a block, d = 0 .. D-1. The loss of an optimizer step is the weighted sum over all valid
drafts of all packs of the step on all processes, divided by the sum of their weights; and that of an epoch likewise.
Dimensions as in loss.py: T tokens of a pack, R anchors, D drafts of a block.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from stages.data import row_lengths
from stages.families.block import loss as block_loss
from stages.families.block.config import EVERYTHING, BlockDraftConfig, Sight
from stages.families.block.loss import BlockLabels
from stages.families.block.model import (
    PLAIN_PARTS,
    BlockAttention,
    BlockDraft,
    BlockLayer,
    LayerParts,
    build_attentions,
)
from stages.params.families import BlockLossWeights, BlockSegment
from stages.training import attention_mask, packed_rows
from stages.training.compile_on_cuda import compile_on_cuda, is_on_gpu
from stages.training.packed_rows import LossOutput, PackedRows, PackIndex, PackRow, SupervisedPack


def build_block_attentions(c: BlockDraftConfig, anchors: Tensor, documents: Tensor) -> list[BlockAttention] | None:
    """Return the attention of each layer for blocks at anchors [R] into packed documents [S].

    None where nothing is compiled: dense masks.
    """
    if not is_on_gpu((documents,)):
        return None
    return build_attentions(c, lambda sight: _build_flex_attention(anchors, documents, c.block_size, sight))


def _build_flex_attention(
    anchors: Tensor, documents: Tensor, block_size: int, sight: Sight = EVERYTHING
) -> BlockAttention:
    """Return FlexAttention over [S context rows | Q block rows], padded; padding is masked out."""
    num_tokens, num_queries = len(documents), len(anchors) * block_size
    num_padded_queries, num_padded_keys = _round_up(num_queries), _round_up(num_tokens + num_queries)
    index = torch.arange(num_queries, device=anchors.device)
    block = index // block_size  # [Q]
    position = anchors[block] + index % block_size  # [Q] in the pack

    def pad(x: Tensor, size: int, value: int) -> Tensor:
        return nn.functional.pad(x, (0, size - len(x)), value=value).int()

    query_block, query_anchor = pad(block, num_padded_queries, -2), pad(anchors[block], num_padded_queries, -1)
    query_document = pad(documents[anchors[block]], num_padded_queries, -2)
    key_document = pad(documents, num_padded_keys, -1)
    key_block = pad(nn.functional.pad(block, (num_tokens, 0), value=-1), num_padded_keys, -1)

    # As tensors: the compiler takes one mask for another where they differ in a number of their closures alone.
    first = position * 0 if sight.window is None else position - sight.window + 1
    last = position if sight.is_causal else position + block_size
    first_seen, last_seen = pad(first, num_padded_queries, 0), pad(last, num_padded_queries, 0)
    key_position = pad(torch.cat([torch.arange(num_tokens, device=anchors.device), position]), num_padded_keys, 0)

    def is_visible(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        in_context = (key_document[k] == query_document[q]) & (k < query_anchor[q])
        is_in_sight = (key_position[k] >= first_seen[q]) & (key_position[k] <= last_seen[q])
        return (in_context | (key_block[k] == query_block[q])) & is_in_sight

    mask = attention_mask.build_flex_mask(is_visible, num_padded_queries, num_padded_keys, anchors.device)

    def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        sizes = num_padded_queries, num_padded_keys, num_padded_keys
        q, k, v = (attention_mask.arrange_by_head(x[0], n) for x, n in zip((query, keys, values), sizes, strict=True))
        out, _ = attention_mask.run_flex_attention(q, k, v, mask)
        return out.transpose(1, 2)[:, :num_queries]

    return attend


def _round_up(size: int) -> int:
    return -(-size // attention_mask.FLEX_PAD_MULTIPLE) * attention_mask.FLEX_PAD_MULTIPLE


@dataclass(kw_only=True)
class BlockPack(SupervisedPack):
    """Concatenated rows, and the blocks that are supervised."""

    anchors: Tensor  # [R] int64: indices into the pack
    label_tokens: Tensor  # [R, D]; this and the following are the fields of BlockLabels
    label_previous: Tensor  # [R, D]
    label_rows: Tensor  # [R, D]
    label_is_valid: Tensor  # [R, D] bool
    label_index: Tensor  # [P]

    @classmethod
    def at_anchors(cls, rows: Sequence[PackRow], anchors: Tensor, num_drafts: int, pinned: bool = False) -> "BlockPack":
        """Build the pack of blocks at anchors [R] on the CPU."""
        packed, is_supervised = PackedRows.concatenate(rows, pinned), torch.cat([r.mask for r in rows])
        labels = block_loss.build_block_labels(packed.ids, is_supervised, packed.row_index, anchors, num_drafts)
        contexts = row_lengths.assign_contexts(packed.position[anchors] + 1)
        return cls(
            **vars(packed),
            anchors=anchors,
            contexts=contexts.where(labels.is_valid[:, 0], len(row_lengths.CONTEXT_EDGES)),
            **{f"label_{name}": tensor for name, tensor in labels._asdict().items()},
            supervised_per_step=labels.is_valid.sum(0).tolist(),
            num_candidates=len(block_loss.list_anchors(is_supervised, packed.row_index)),
        )

    @property
    def labels(self) -> BlockLabels:
        return BlockLabels(*(getattr(self, f"label_{name}") for name in BlockLabels._fields))

    def without_supervision(self) -> "BlockPack":
        by_block = [name for name in vars(self) if name in ("anchors", "contexts") or name.startswith("label_")]
        none = {name: getattr(self, name)[:0] for name in by_block}
        return replace(self, **none, supervised_per_step=[0] * len(self.supervised_per_step), num_candidates=0)


@dataclass(frozen=True)
class BlockTrainingObjective:
    """Number of blocks, seed and loss of a block draft's training, and the scale of the target's logits."""

    num_steps: int  # D drafts of a block
    num_anchors: int  # most blocks of a pack
    seed: int
    loss: BlockLossWeights
    logits_scale: float = 1.0  # of the target's manifest

    @classmethod
    def of_segment(
        cls, segment: BlockSegment, num_drafts: int, seed: int, logits_scale: float = 1.0
    ) -> "BlockTrainingObjective":
        """Return the method's own objective, with the segment's decay where it has one."""
        loss = segment.family.loss
        loss = loss if segment.decay is None else replace(loss, decay=segment.decay)
        return cls(num_drafts, segment.anchors, seed, loss, logits_scale)

    def build_pack(self, rows: Sequence[PackRow], pack_index: PackIndex, pinned: bool) -> BlockPack:
        """Build a pack on the CPU, its anchors drawn by the seed and `pack_index`."""
        is_supervised = torch.cat([r.mask for r in rows])
        documents = torch.arange(len(rows)).repeat_interleave(torch.tensor([len(r.ids) for r in rows]))
        anchors = block_loss.sample_anchors(
            is_supervised, documents, self.num_anchors, pack_index.seed_generator(self.seed)
        )
        return BlockPack.at_anchors(rows, anchors, self.num_steps, pinned)

    def list_weights(self) -> list[float]:
        """Return the weight of each draft of a block, D."""
        decay = self.loss.decay
        return [1.0 if decay is None else math.exp(-d / decay) for d in range(self.num_steps)]

    def combine_losses(self, step_loss: Sequence[float], counts: Sequence[float]) -> float:
        """Return the mean of the drafts' losses by their weights."""
        weights = [w * n for w, n in zip(self.list_weights(), counts, strict=True)]
        return sum(w * x for w, x in zip(weights, step_loss, strict=True)) / max(sum(weights), 1e-12)


def compute_loss(
    draft: BlockDraft,
    pack: BlockPack,
    embedding: Tensor,  # [V, H] the target's, frozen
    head: Tensor,  # [V, H] the target's, frozen
    objective: BlockTrainingObjective,
    counts: Tensor,  # [D] valid drafts of the whole step, of all packs and processes
) -> LossOutput:
    """Compute the loss of a pack. Total losses of the packs of a step add up to the loss of the step."""
    if not len(pack.anchors):
        return packed_rows.compute_zero_loss(draft, pack, objective.num_steps)
    divisor = (counts * _copy_weights(objective, counts.device)).sum()
    features, parts = pack.features.to(draft.fc.weight.dtype), _COMPILED_PARTS if pack.ids.is_cuda else PLAIN_PARTS
    context = draft.project_context(features[None], pack.position[None], parts)
    attentions = build_block_attentions(draft.config, pack.anchors, pack.row_index)
    hidden = draft.forward_pack(
        embedding, pack.ids, pack.position, pack.row_index, pack.anchors, context, attentions, parts
    )
    given = draft, hidden, pack.labels, pack.last, head, objective.loss, divisor
    found = block_loss.compute_block_loss(*given, logits_scale=objective.logits_scale)
    by_draft = objective.loss.ce * found.ce + objective.loss.l1 * found.l1
    by_draft = by_draft + objective.loss.confidence * found.confidence + objective.loss.selector * found.selector
    return LossOutput(found.total_loss, by_draft.sum(0), found.matches.T)


@functools.cache
def _copy_weights(objective: BlockTrainingObjective, device: torch.device) -> Tensor:
    """Return the weights of drafts [D] float64 on the device, copied once: a copy of such memory waits for the GPU."""
    return torch.tensor(objective.list_weights(), dtype=torch.float64, device=device)


_PREPARE, _FINISH = compile_on_cuda(BlockLayer.prepare_attention), compile_on_cuda(BlockLayer.finish)


def _prepare_attention(
    layer: BlockLayer, hidden: Tensor, rope: tuple[Tensor, Tensor], keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _PREPARE(layer, _require_gradient(hidden), rope, keys, values)


def _finish_layer(layer: BlockLayer, hidden: Tensor, attended: Tensor) -> Tensor:
    return _FINISH(layer, _require_gradient(hidden), attended)


def _require_gradient(hidden: Tensor) -> Tensor:
    """Return the input of a layer as a tensor with a gradient, so that one compiled form serves all layers.

    The input of the first is the frozen embedding, whose gradient is not read.
    """
    return hidden if hidden.requires_grad else hidden.detach().requires_grad_(torch.is_grad_enabled())


_COMPILED_PARTS = LayerParts(compile_on_cuda(PLAIN_PARTS.project_context), _prepare_attention, _finish_layer)
