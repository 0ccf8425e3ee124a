"""Block drafts for benchmarks/training.py: their shape, and the work of the packs that were trained on.

Qwen3-8B's shape: a target of 36 layers, hidden 4,096, vocabulary 151,936; a draft of five layers of Qwen3-8B's own sizes, which
reads five feature layers; blocks of 16 for DFlash and DFlash2, whose convolutions and selector have the published sizes, of 7
and a Markov head of rank 256 for DSpark. With --hidden all sizes but those and the blocks shrink in proportion.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stages.families.block.model import BlockDraft, BlockDraftConfig
from stages.families.block.objective import BlockPack, BlockTrainingObjective
from stages.hidden_states.reader import HiddenStatesReader
from stages.reproduce.block_flop import BlockCounts, count_block_flop
from stages.training.packed_rows import PackIndex, PackRow
from stages.training.packs import plan_epoch
from stages.training.trainer import Trainer

FEATURE_LAYERS = (2, 10, 18, 26, 34)  # of 36
BLOCK_SIZES, MARKOV_RANK = {"dflash": 16, "dflash2": 16, "dspark": 7}, 256
DFLASH2: dict[str, Any] = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
WIDTH = 128  # of a head


@dataclass(frozen=True)
class CountedObjective(BlockTrainingObjective):
    """The objective, which notes the work of every pack that it builds."""

    built: list[tuple[int, BlockCounts]] = field(default_factory=list, compare=False)  # with its epoch

    def build_pack(self, rows: Sequence[PackRow], pack_index: PackIndex, pinned: bool) -> BlockPack:
        pack = super().build_pack(rows, pack_index, pinned)
        size = BLOCK_SIZES["dspark" if self.loss.confidence else "dflash"]  # dflash2 has that of dflash
        seen = int(pack.position[pack.anchors].sum())  # context tokens, by all blocks
        blocks, drafts = len(pack.anchors), sum(pack.supervised_per_step)
        work = BlockCounts(len(pack.ids), blocks, drafts, size * (seen + blocks * size))
        self.built.append((pack_index.epoch, work))
        return pack


def build_block_draft(args: argparse.Namespace) -> BlockDraft:
    """Return a draft of `args.method` with the weights of its constructor."""
    heads = max(1, args.hidden // WIDTH)
    return BlockDraft(
        BlockDraftConfig(
            hidden_size=args.hidden, intermediate_size=3 * args.hidden, num_hidden_layers=args.layers,
            num_attention_heads=heads, num_key_value_heads=max(1, heads // 4), head_dim=WIDTH, vocab_size=args.vocab,
            max_position_embeddings=40960, rms_norm_eps=1e-6, rope={"rope_theta": 1e6, "rope_type": "default"},
            method=args.method, block_size=BLOCK_SIZES[args.method], mask_token_id=args.vocab - 267,
            feature_layers=args.layer_ids, markov_rank=MARKOV_RANK if args.method == "dspark" else 0,
            confidence_head=args.method == "dspark", **(DFLASH2 if args.method == "dflash2" else {}),
        )
    )  # fmt: skip


def describe_work(
    run: Trainer, store: HiddenStatesReader, step_seconds: list[list[float]], peak: float
) -> dict[str, Any]:
    """Return blocks a second, seconds a step and MFU of the epochs after the first, and the FLOP that these count.

    `mfu` is by whole epochs; `steady_mfu` by the time from step to step, as it is of an
    epoch of thousands. Of several processes each builds its share of the packs: rates are those of the first times their number.
    """
    objective, world = run.objective, run.ranks.world
    assert isinstance(objective, CountedObjective)
    flop = count_block_flop(run.draft.config, reads_target=bool(objective.loss.l1))
    plans = [plan_epoch(store.lengths, run.settings, number) for number in range(len(run.log))]
    work = BlockCounts(*map(sum, zip(*(work for epoch, work in objective.built if epoch > 0), strict=True)))
    seconds, steps = sum(entry.seconds for entry in run.log[1:]), sum(map(len, plans[1:]))
    steady = [s for epoch in step_seconds[1:] for s in epoch]
    step_s = sum(steady) / len(steady) if steady else seconds / steps
    total, blocks = flop.dot(work), int(work.blocks)
    mean_pairs = work.pairs / work.blocks
    return {
        "parameters": sum(p.numel() for p in run.draft.parameters()), "anchors": objective.num_anchors,
        "step_s": round(seconds / steps, 4), "steady_step_s": round(step_s, 4),
        "blocks_per_s": round(world * blocks / seconds), "steady_blocks_per_s": round(world * blocks / steps / step_s),
        "mfu": round(total / seconds / peak, 4), "steady_mfu": round(total / steps / step_s / peak, 4),  # of each GPU
        "gflop_per_context_token": round(flop.tokens / 1e9, 4),
        "gflop_per_block": round((total - flop.tokens * work.tokens) / blocks / 1e9, 3),
        "of_a_block": {
            "layers": round(flop.blocks / 1e9, 3), "attention": round(flop.pairs * mean_pairs / 1e9, 3),
            "heads": round(flop.drafts * work.drafts / blocks / 1e9, 3),
        },
        "tflop_per_step": round(world * total / steps / 1e12, 3), "drafts_per_block": round(work.drafts / blocks, 2),
    }  # fmt: skip
