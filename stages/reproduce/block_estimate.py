"""Sizes and FLOP of the block drafts that a run trains, by their segments."""

import math
from dataclasses import dataclass

from stages.draft import block_checkpoint
from stages.draft.block_draft import BlockDraftConfig
from stages.draft.eagle3_config import DraftConfig
from stages.families.block import training as block_training_start
from stages.families.block.objective import OBJECTIVES
from stages.params import schema
from stages.params.families import BlockSegment
from stages.params.units import format_bytes
from stages.reproduce.block_flop import BlockFlop, BlockWork
from stages.reproduce.target_size import RecipeEstimate, format_count, get_itemsize
from stages.target.manifest import TargetManifest


@dataclass(frozen=True)
class BlockSize:
    """Parameters of a block draft."""

    layers: int  # in all of them, with the final norm and that of the context
    fc: int
    markov: int
    confidence: int
    selector: int

    @classmethod
    def of_config(cls, c: BlockDraftConfig) -> "BlockSize":
        sizes = {name: math.prod(shape) for name, shape in block_checkpoint.list_block_tensor_shapes(c).items()}
        fc, markov, confidence, selector = (
            sum(size for name, size in sizes.items() if name.startswith(part))
            for part in ("fc.", "markov_head.", "confidence_head.", "candidate_selector.")
        )
        heads = fc, markov, confidence, selector
        return cls(sum(sizes.values()) - sum(heads), *heads)

    @property
    def total(self) -> int:
        return self.layers + self.fc + self.markov + self.confidence + self.selector

    def count_training_bytes(self, itemsize: int) -> int:
        """Return the bytes of weights, gradients and moments while training in a dtype of `itemsize` bytes.

        Weights, gradient and both moments are float32; below it there are weights and a gradient in the dtype too.
        """
        return self.total * (16 if itemsize == 4 else 16 + 2 * itemsize)


def build_segment_config(name: str, p: schema.Params, root: DraftConfig, target: TargetManifest) -> BlockDraftConfig:
    """Return the shape of a segment's draft; `root` is that of e000. Its mask token changes no size and is 0."""
    segment = p.train_draft.checkpoints[name]
    assert isinstance(segment, BlockSegment), name
    return block_training_start.choose_sizes(segment, root, target, mask_token_id=0)


def estimate_epoch(p: schema.Params, segment: BlockSegment, rows: int, length: int) -> BlockWork:
    """Return the most that an epoch of `rows` rows of `length` tokens has: full packs, all positions supervised, whole blocks."""
    tokens = rows * length
    pack = min(tokens, p.train_draft.batch_tokens)
    blocks = tokens / max(pack, 1) * min(segment.anchors, pack)
    seen = length / 2 + segment.block_size  # keys of a row, on average
    return BlockWork(tokens, blocks, blocks * segment.num_drafts, blocks * segment.block_size * seen)


def compute_block_flop(segment: BlockSegment, config: BlockDraftConfig) -> BlockFlop:
    """Return the FLOP of training with the method's own loss."""
    return BlockFlop.of_config(config, reads_target=bool(OBJECTIVES[segment.method].l1))


def add_sizes(result: RecipeEstimate, p: schema.Params, manifest: TargetManifest, draft: DraftConfig) -> None:
    """Add a line of each untrained block draft's parameters, and one of the memory that its training takes."""
    size = get_itemsize(p.train_draft.dtype)
    tables = 2 * manifest.vocab_size * manifest.hidden_size * size
    for name in p.train_draft.list_fresh_drafts():
        config = build_segment_config(name, p, draft, manifest)
        found = BlockSize.of_config(config)
        parts = [f"{config.num_hidden_layers} layers {format_count(found.layers)}", f"fc {format_count(found.fc)}"]
        parts += [f"Markov head of rank {config.markov_rank} {format_count(found.markov)}"] * bool(found.markov)
        parts += [f"selector of rank {config.selector_rank} {format_count(found.selector)}"] * bool(found.selector)
        parts += [f"confidence head {found.confidence:,}"] * bool(found.confidence)
        derivation = ", ".join(parts) + f"; a layer has the sizes of e000's, {config.intermediate_size} within"
        result.add_line(f"block draft of {name}", f"{format_count(found.total)} parameters", derivation)
        if p.target.device == "cpu":
            continue
        held = found.count_training_bytes(size)
        of_tables = f"the target's embedding and head {format_bytes(tables)}"
        derivation = f"weights, gradients and moments {format_bytes(held)}, {of_tables}; activations"
        result.add_line(f"GPU memory, training {name}", f"{format_bytes(held + tables)} and more", derivation)
