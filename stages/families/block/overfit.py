"""The overfit gate of a block draft: a fresh one of a segment's method and sizes, by its own loss.

Each step draws anchors of the row again, as training does. The labels of DFlash and DFlash2 are the row's own tokens; of
DSpark mostly the target's distribution, so its chains get as far as the target's most likely tokens are the row's, as those of
EAGLE-3 do.

Letters: R anchors, D drafts of a block.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from stages.families.block import loss as block_loss
from stages.families.block import objective as block_training
from stages.families.block.objective import BlockPack, BlockTrainingObjective
from stages.families.block.training import Training
from stages.families.draft_files import LoadedDraft
from stages.families.overfit_run import OverfitRun
from stages.hidden_states.format import HiddenStatesRow
from stages.params import schema
from stages.params.families import BlockSegment
from stages.target.manifest import TargetManifest
from stages.training.packed_rows import PackIndex

# Of a step: nothing is compiled here, so masks are dense, and those of 512 blocks of 16 would take 100 GB in five layers.
MOST_ANCHORS = 256


class BlockOverfit(OverfitRun):
    """An untrained block draft; the segment names its loss and the anchors of a step."""

    def __init__(self, loaded: LoadedDraft, segment: BlockSegment, seed: int, device: str, logits_scale: float):
        super().__init__(loaded, device)
        self.num_steps = self.draft.config.num_drafts
        few = segment.model_copy(update={"anchors": min(segment.anchors, MOST_ANCHORS)})
        self.objective = BlockTrainingObjective.of_segment(few, self.num_steps, seed, logits_scale)
        self.learns_own_tokens = not self.objective.loss.l1

    def generate_losses(self, row: HiddenStatesRow, embedding: Tensor, head: Tensor) -> Iterator[Tensor]:
        for step in itertools.count():
            pack = self.objective.build_pack([row], PackIndex(0, step, 0), pinned=False).to(self.device)
            counts = torch.tensor(pack.supervised_per_step, device=self.device)
            yield block_training.compute_loss(self.draft, pack, embedding, head, self.objective, counts).total_loss

    @torch.no_grad()
    def count_accepted(self, row: HiddenStatesRow, embedding: Tensor, head: Tensor) -> Sequence[int]:
        """Count argmax matches with the labels, of blocks at every position of the answer, some at a time."""
        anchors = block_loss.list_anchors(row.mask, torch.zeros_like(row.ids))
        accepted: list[int] = []
        for anchor_group in anchors.split(self.objective.num_anchors):
            pack = BlockPack.at_anchors([row], anchor_group, self.num_steps).to(self.device)
            if not self.learns_own_tokens:
                likely = (pack.last.to(head.dtype) @ head.T).argmax(-1)  # [T]
                pack = replace(pack, label_tokens=likely[pack.label_rows])
            counts = torch.tensor(pack.supervised_per_step, device=self.device)
            found = block_training.compute_loss(self.draft, pack, embedding, head, self.objective, counts)
            accepted += found.argmax_matches.T.int().cumprod(1).sum(1).tolist()
        return accepted


def build_overfit(name: str, params: schema.Params, target: TargetManifest, device: str) -> OverfitRun:
    segment, seed = params.train_draft.checkpoints[name], params.train_draft.seed
    assert isinstance(segment, BlockSegment), name
    made = Training(segment.family).initialise(name, params, target, torch.empty(0))
    return BlockOverfit(made, segment, seed, device, target.logits_scale)
