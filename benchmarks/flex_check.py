"""Is training on a GPU, with flex attention and compiled pieces, what it is on a CPU?   python -m benchmarks.flex_check

The same pack in float32 on both, in bfloat16 on the GPU: the loss of each step, the number of hits, and the gradient of
every weight by |gpu - cpu| / |cpu|. Exits with 1 where float32 is off by more than 1e-5 (lk_alpha 1e-2: at a random
draft's acceptances of 1e-3 and less, which of two near numbers is the smaller weighs much). The CPU's side is tested
against a slow draft in tests/training/test_ttt.py. Then the same of block drafts (tests/test_train_block_drafts.py), off by no
more than 1e-4. `--blocks`: block drafts in float32 alone, for a quick answer.
"""

import argparse
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from triton.testing import do_bench

from stages.draft.block_config import BlockDraftConfig
from stages.draft.block_draft import BlockDraft
from stages.draft.eagle3 import Eagle3Draft
from stages.draft.eagle3_config import DraftConfig
from stages.training import attention_mask, block_training, ttt
from stages.training.block_training import OBJECTIVES, BlockTrainingObjective
from stages.training.packed_rows import PackIndex

H, V, D, STEPS = 512, 2000, 1500, 7
BLOCK_DRAFTS: tuple[tuple[str, int, dict[str, Any]], ...] = (  # method, block_size and the sizes of its own
    ("dflash", 8, {}),
    ("dflash2", 8, {"conv_kernel_size": 3, "conv_group_size": 64, "selector_rank": 32, "selector_top_k": 8}),
    ("dspark", 7, {"markov_rank": 32, "confidence_head": True}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", action="store_true", help="block drafts in float32 alone")
    args = parser.parse_args()
    torch.manual_seed(0)
    plain = DraftConfig(H, 2 * H, 8, 2, 64, V, D, 4096, 1e-6, {"rope_theta": 1e4, "rope_type": "default"})
    options = replace(plain, fc_norm=True, norm_output=True, qk_norm=True, sliding_window=100)
    embedding, head = torch.randn(2, V, H) * 0.3
    spans = [(30, 900), (5, 300), (200, 1500), (0, 64)]
    rows = [
        SimpleNamespace(
            ids=torch.randint(0, V, (end + 9,)), features=torch.randn(end + 9, 3 * H), last=torch.randn(end + 9, H),
            mask=(torch.arange(end + 9) >= start) & (torch.arange(end + 9) < end),
        )
        for start, end in spans
    ]  # fmt: skip
    if args.blocks:
        sys.exit(not compare_block_drafts(rows, embedding, head, "cuda", (torch.float32,)))
    good = True
    for config, loss in ((plain, "ce"), (plain, "lk_alpha"), (plain, "lk_lambda"), (options, "ce")):
        draft = Eagle3Draft(config)
        draft.t2d[:D] = True
        pack = ttt.TrainingPack.from_rows(rows, STEPS, "aligned")
        reference = learn(draft, pack, embedding, head, loss)
        for dtype in (torch.float32, torch.bfloat16):
            there = Eagle3Draft(config)
            there.load_state_dict(draft.state_dict())
            there = there.to("cuda").to(dtype)
            found = learn(there, pack.to("cuda"), embedding.to("cuda", dtype), head.to("cuda", dtype), loss)
            off = {n: float((found[n] - g).norm() / g.norm()) for n, g in reference.items()}
            print(
                loss, "options" if config is options else "", dtype, {n: f"{x:.1e}" for n, x in off.items()}, flush=True
            )
            off.pop("hits")  # near ties differ by rounding
            good &= dtype != torch.float32 or max(off.values()) < (1e-2 if loss == "lk_alpha" else 1e-5)
    good &= compare_block_drafts(rows, embedding, head, "cuda")
    time_merge()
    sys.exit(not good)


def compare_block_drafts(
    rows: list, embedding: torch.Tensor, head: torch.Tensor, device: str, dtypes=(torch.float32, torch.bfloat16)
) -> bool:
    """Print how far block drafts on `device` are from those on the CPU; return whether float32 is near."""
    good = True
    for method, size, sizes in BLOCK_DRAFTS:
        config = BlockDraftConfig(
            hidden_size=H, intermediate_size=2 * H, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
            head_dim=64, vocab_size=V, max_position_embeddings=4096, rms_norm_eps=1e-6,
            rope={"rope_theta": 1e4, "rope_type": "default"}, method=method, block_size=size, mask_token_id=0,
            feature_layers=(1, 2, 3), **sizes,
        )  # fmt: skip
        draft = BlockDraft(config)
        objective = BlockTrainingObjective(config.num_drafts, 100, 0, OBJECTIVES[method])
        pack = objective.build_pack(rows, PackIndex(0, 0, 0), pinned=False)
        reference = learn_block(draft, pack, embedding, head, objective)
        for dtype in dtypes:
            there = BlockDraft(config)
            there.load_state_dict(draft.state_dict())
            there = there.to(device).to(dtype)
            tables = embedding.to(device, dtype), head.to(device, dtype)
            found = learn_block(there, pack.to(device), *tables, objective)
            off = {n: float((found[n] - g).norm() / g.norm()) for n, g in reference.items()}
            print(method, dtype, {n: f"{x:.1e}" for n, x in off.items()}, flush=True)
            good &= dtype != torch.float32 or max(off.values()) < 1e-4
    return good


def time_merge() -> None:
    """Print milliseconds of merge_own_steps, forward and backward, by the kernels and by torch.compile, at 8B shape."""
    positions, heads, groups, width = 16384, 32, 8, 128
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_(True)  # noqa: E731
    out, query, lse = make(positions, heads, width), make(positions, heads, width), torch.randn(positions, heads).cuda()
    for steps in (1, 3, 6):
        keys, values = ([make(positions, groups, width) for _ in range(steps)] for _ in range(2))
        slope = torch.randn_like(out)
        for name, merge in (("kernels", attention_mask.merge_own_steps), ("compiled", compiled_merge)):

            def both(merge=merge, keys=keys, values=values, slope=slope) -> None:
                merge(out, lse, query, keys, values).to(slope.dtype).backward(slope)

            print(f"merge, {steps} own steps, {name}: {do_bench(both, return_mode='median'):.2f} ms", flush=True)


def compiled_merge(out, lse, query, keys, values):
    return attention_mask._merge_own_steps_torch(out, lse, query, torch.stack(keys), torch.stack(values))


def learn(draft: Eagle3Draft, pack: ttt.TrainingPack, embedding, head, loss: str) -> dict[str, torch.Tensor]:
    draft.zero_grad()
    result = ttt.compute_loss(draft, pack, embedding, head, ttt.TrainingObjective(STEPS, loss=loss))
    result.total_loss.backward()
    told = {"total": result.total_loss, "loss": result.loss_per_step, "hits": result.argmax_matches.sum(1)}
    return {
        n: t.detach().float().cpu() for n, t in {**told, **{n: p.grad for n, p in draft.named_parameters()}}.items()
    }


def learn_block(draft: BlockDraft, pack, embedding, head, objective: BlockTrainingObjective) -> dict[str, torch.Tensor]:
    counts = torch.tensor(pack.supervised_per_step, device=pack.ids.device)
    result = block_training.compute_loss(draft, pack, embedding, head, objective, counts)
    result.total_loss.backward()
    told = {"total": result.total_loss, "loss": result.loss_per_step}
    return {
        n: t.detach().float().cpu() for n, t in {**told, **{n: p.grad for n, p in draft.named_parameters()}}.items()
    }


if __name__ == "__main__":
    main()
